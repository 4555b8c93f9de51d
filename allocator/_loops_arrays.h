/* What every compiled loop needs: attributes, arrays, and the slots of a sequence. Part of _loops.c. */

/* Attributes that are integers. -1 with an exception set when one is not; no integer here is negative. */
static int64_t get_int(PyObject *owner, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL)
        return -1;
    int64_t n = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return n;
}

static int set_int(PyObject *owner, PyObject *name, int64_t n)
{
    PyObject *value = PyLong_FromLongLong(n);
    if (value == NULL)
        return -1;
    int status = PyObject_SetAttr(owner, name, value);
    Py_DECREF(value);
    return status;
}

/* `owner.method(n)`; a name that was not interned would fill the interpreter's cache of methods. */
static PyObject *call_with_int(PyObject *owner, PyObject *method, int64_t n)
{
    PyObject *number = PyLong_FromLongLong(n);
    if (number == NULL)
        return NULL;
    PyObject *answer = PyObject_CallMethodOneArg(owner, method, number);
    Py_DECREF(number);
    return answer;
}

/* The memory of an array, while it is open. A struct that is all zeros is closed. */
typedef struct {
    Py_buffer view;
    union {
        int32_t *ints;
        uint32_t *places;
        uint64_t *words;
        char *bytes;
    };
    Py_ssize_t n;
} Array;

static int open_array(PyObject *object, Array *array)
{
    if (PyObject_GetBuffer(object, &array->view, PyBUF_WRITABLE) < 0)
        return -1;
    array->ints = array->view.buf;
    array->n = array->view.len / array->view.itemsize;
    return 0;
}

static int open_attribute(PyObject *owner, PyObject *name, Array *array)
{
    PyObject *object = PyObject_GetAttr(owner, name);
    if (object == NULL)
        return -1;
    int status = open_array(object, array); /* the view keeps the object alive */
    Py_DECREF(object);
    return status;
}

static void close_array(Array *array)
{
    if (array->view.obj != NULL)
        PyBuffer_Release(&array->view);
    array->ints = NULL;
}

/* A block of a list; -1, which is none, for anything else. */
static int64_t block_at(PyObject *list, Py_ssize_t i)
{
    PyObject *block = PyList_GET_ITEM(list, i);
    int overflow;
    return PyLong_CheckExact(block) ? PyLong_AsLongLongAndOverflow(block, &overflow) : -1;
}

/* The slots of `Sequence`, by their place in the object: `bind` has asked the class for it. */
#define SLOTS(X) \
    X(_due) X(_hashes) X(_num_computed) X(_num_reserved) X(_row) X(_settled_at) X(_table) X(_tokens) X(max_length) X(media)

#define DECLARE_SLOT(name) static Py_ssize_t at_##name;
SLOTS(DECLARE_SLOT)

/* What a slot holds, borrowed. No sequence that anybody else has seen has an empty one. */
#define SLOT(seq, name) (*(PyObject **)((char *)(seq) + at_##name))
#define GET(seq, name) PyLong_AsLongLong(SLOT(seq, name))

static int set_slot(PyObject **slot, int64_t n)
{
    PyObject *value = PyLong_FromLongLong(n);
    if (value == NULL)
        return -1;
    Py_SETREF(*slot, value);
    return 0;
}

#define SET(seq, name, n) set_slot(&SLOT(seq, name), n)

/* `bind(Sequence)`, once, before anything that takes a sequence. */
static PyObject *bind(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
#define FIND_SLOT(name) \
    { \
        PyObject *member = PyObject_GetAttr(args[0], s_##name); \
        if (member == NULL) \
            return NULL; \
        if (Py_TYPE(member) != &PyMemberDescr_Type) \
            return PyErr_Format(PyExc_TypeError, "%U is no slot", s_##name); \
        at_##name = ((PyMemberDescrObject *)member)->d_member->offset; \
        Py_DECREF(member); \
    }
    SLOTS(FIND_SLOT)
    Py_RETURN_NONE;
}

/* Append `n` 64-bit words to an array of them. */
static int append_words(PyObject *array, const uint64_t *words, Py_ssize_t n)
{
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)words, n * (Py_ssize_t)sizeof *words);
    PyObject *done = bytes == NULL ? NULL : PyObject_CallMethodOneArg(array, s_frombytes, bytes);
    Py_XDECREF(bytes);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The last of an array of 64-bit words, of which there is one. */
static int last_word(PyObject *array, uint64_t *word)
{
    Array words = {0};
    if (open_array(array, &words) < 0)
        return -1;
    *word = words.words[words.n - 1];
    close_array(&words);
    return 0;
}

/* Make an array `more` elements longer, before the first change, and cut it to what was used, after the last one. */
static Py_ssize_t lengthen(PyObject *array, Py_ssize_t more)
{
    Py_ssize_t length = PyObject_Size(array);
    PyObject *space = PyBytes_FromStringAndSize(NULL, more * (Py_ssize_t)sizeof(int32_t));
    PyObject *done = length < 0 || space == NULL ? NULL : PyObject_CallMethodOneArg(array, s_frombytes, space);
    Py_XDECREF(space);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return length;
}

static int cut(PyObject *array, Py_ssize_t length)
{
    return PySequence_DelSlice(array, length, PY_SSIZE_T_MAX);
}

/* An error, or none, while what it leaves behind is put in order. */
typedef struct {
    PyObject *type, *value, *traceback;
} Error;

static Error set_aside(void)
{
    Error error;
    PyErr_Fetch(&error.type, &error.value, &error.traceback);
    return error;
}

/* Raise it again, unless another one has come since. */
static void take_up(Error error)
{
    if (!PyErr_Occurred())
        PyErr_Restore(error.type, error.value, error.traceback);
    else {
        Py_XDECREF(error.type);
        Py_XDECREF(error.value);
        Py_XDECREF(error.traceback);
    }
}

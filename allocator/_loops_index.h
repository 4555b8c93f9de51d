/* `PrefixIndex` and the hashes of sequences. Part of _loops.c. */

typedef struct {
    uint64_t node, parent, hash, block, child, older, younger, spare;
} Record;

#define WORDS ((Py_ssize_t)(sizeof(Record) / sizeof(uint64_t)))

typedef struct {
    Array records, keys, lookup;
    PyObject *more_key;
    Py_ssize_t key_size;
} Index;

static void close_index(Index *index)
{
    close_array(&index->records);
    close_array(&index->keys);
    close_array(&index->lookup);
    Py_CLEAR(index->more_key);
}

static int open_index(PyObject *self, Index *index)
{
    memset(index, 0, sizeof *index);
    if (open_attribute(self, s__records, &index->records) < 0 || open_attribute(self, s__keys, &index->keys) < 0 ||
        open_attribute(self, s__lookup, &index->lookup) < 0 ||
        (index->more_key = PyObject_GetAttr(self, s__more_key)) == NULL ||
        (index->key_size = get_int(self, s__key_size)) < 0) {
        close_index(index);
        return -1;
    }
    return 0;
}

static Record *record_at(Index *index, uint64_t place)
{
    return (Record *)(index->records.words + place);
}

static uint32_t place_of(uint64_t node)
{
    return (uint32_t)(node << 3);
}

static Record *record_of(Index *index, uint64_t node)
{
    return record_at(index, place_of(node));
}

/* Whether there is such a node. Not of 0, which is none. */
static int is_alive(Index *index, uint64_t node)
{
    Py_ssize_t place = (Py_ssize_t)place_of(node);
    return place + WORDS <= index->records.n && record_of(index, node)->node == node;
}

static char *key_at(Index *index, uint64_t place)
{
    return index->keys.bytes + (Py_ssize_t)place / WORDS * index->key_size;
}

/* `_tag` of index.py. */
static uint64_t tag_of(uint64_t hash)
{
    return hash * UINT64_C(0x9E3779B97F4A7C15) >> 32;
}

/* The entry of the hash table that a hash names. */
static uint64_t *entry_of(Index *index, uint64_t hash)
{
    return &index->lookup.words[tag_of(hash) & (uint64_t)(index->lookup.n - 1)];
}

/* `_enter` of index.py. */
static void enter(Array *lookup, uint64_t tag, uint64_t place)
{
    const uint64_t mask = (uint64_t)lookup->n - 1;
    uint64_t at = tag & mask;
    while (lookup->words[at])
        at = (at + 1) & mask;
    lookup->words[at] = tag << 32 | place;
}

/* The hash table's part of `PrefixIndex._forget`. */
static void leave(Array *lookup, uint64_t tag, uint64_t place)
{
    const uint64_t mask = (uint64_t)lookup->n - 1;
    uint64_t *words = lookup->words, gap = tag & mask, at;
    while ((uint32_t)words[gap] != place)
        gap = (gap + 1) & mask;
    for (at = (gap + 1) & mask; words[at]; at = (at + 1) & mask)
        if (((at - (words[at] >> 32)) & mask) >= ((at - gap) & mask)) {
            words[gap] = words[at];
            gap = at;
        }
    words[gap] = 0;
}

/* Whether a dict has the number; yes where that can't be found out, for that leaves it to Python. */
static int has(PyObject *dict, uint64_t key)
{
    if (PyDict_GET_SIZE(dict) == 0)
        return 0;
    PyObject *number = PyLong_FromUnsignedLongLong(key);
    int answer = number == NULL ? -1 : PyDict_Contains(dict, number);
    Py_XDECREF(number);
    if (answer < 0)
        PyErr_Clear();
    return answer != 0;
}

/* `PrefixIndex.find`: the record of exactly this key of `key_size` bytes after exactly this parent, or NULL. */
static Record *find(Index *index, uint64_t parent, const char *key, uint64_t hash)
{
    const uint64_t mask = (uint64_t)index->lookup.n - 1, tag = tag_of(hash);
    for (uint64_t at = tag & mask, entry; (entry = index->lookup.words[at]) != 0; at = (at + 1) & mask) {
        if (entry >> 32 != tag)
            continue;
        Record *record = record_at(index, (uint32_t)entry);
        if (record->parent == parent && memcmp(key_at(index, (uint32_t)entry), key, (size_t)index->key_size) == 0 &&
            !has(index->more_key, record->node))
            return record;
    }
    return NULL;
}

/* The token ids of a list; 0 when there is anything else in it. */
static int read_tokens(PyObject *tokens, int32_t *to)
{
    Py_ssize_t n = PyList_GET_SIZE(tokens);
    for (Py_ssize_t i = 0; i < n && i < 32; i++) /* sampled tokens lie far apart */
        __builtin_prefetch(PyList_GET_ITEM(tokens, i));
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + 32 < n)
            __builtin_prefetch(PyList_GET_ITEM(tokens, i + 32));
        PyObject *token = PyList_GET_ITEM(tokens, i);
        int overflow;
        long value = PyLong_CheckExact(token) ? PyLong_AsLongAndOverflow(token, &overflow) : -1;
        if (value < 0 || value > INT32_MAX)
            return 0;
        to[i] = (int32_t)value;
    }
    return 1;
}

/* `array("i", tokens)` of a list of token ids, see `token_array`; None when there is anything else in it. */
static PyObject *token_array(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *array_type = args[0], *tokens = args[1], *array;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, PyList_GET_SIZE(tokens) * (Py_ssize_t)sizeof(int32_t));
    if (bytes == NULL)
        return NULL;
    if (read_tokens(tokens, (int32_t *)PyBytes_AS_STRING(bytes)))
        array = PyObject_CallFunction(array_type, "CO", 'i', bytes);
    else
        array = Py_NewRef(Py_None);
    Py_DECREF(bytes);
    return array;
}

/* `hash_block(key, hash)` takes the place of `hash`, its parent's: 1 when it has, 0 where it is no 64-bit word, which
 * Python says better, -1 for an error. */
static int next_hash(PyObject *hash_block, PyObject *key, uint64_t *hash)
{
    PyObject *seed = PyLong_FromUnsignedLongLong(*hash);
    if (seed == NULL)
        return -1;
    PyObject *call[] = {key, seed};
    PyObject *answer = PyObject_Vectorcall(hash_block, call, 2, NULL);
    Py_DECREF(seed);
    if (answer == NULL)
        return -1;
    *hash = PyLong_AsUnsignedLongLong(answer);
    Py_DECREF(answer);
    if (!PyErr_Occurred())
        return 1;
    PyErr_Clear();
    return 0;
}

/* The loop of `PrefixCache._hashes` without media: the hashes up to block `stop`, of which there is one already. Its
 * caller goes on where one is refused, and refuses it again. */
static PyObject *hash_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *hash_block = args[0], *seq = args[1];
    Py_ssize_t stop = PyLong_AsSsize_t(args[2]), size = PyLong_AsSsize_t(args[3]), done = 0;
    Py_ssize_t first = PyObject_Size(SLOT(seq, _hashes)), n = stop - first;
    uint64_t hash, *hashes = NULL;
    int32_t *copy = NULL;
    Array tokens = {0};
    int status = 1;
    if (PyErr_Occurred())
        return NULL;
    if (n <= 0)
        Py_RETURN_NONE;
    if (last_word(SLOT(seq, _hashes), &hash) < 0 || open_array(SLOT(seq, _tokens), &tokens) < 0)
        return NULL;
    if (stop > tokens.n / size)
        n = 0;
    else if ((copy = PyMem_New(int32_t, n * size)) == NULL || (hashes = PyMem_New(uint64_t, n)) == NULL) {
        PyErr_NoMemory();
        status = -1;
    } else
        memcpy(copy, tokens.ints + first * size, (size_t)(n * size) * sizeof *copy);
    close_array(&tokens);
    while (status == 1 && done < n) {
        PyObject *key = PyBytes_FromStringAndSize((char *)(copy + done * size), size * (Py_ssize_t)sizeof *copy);
        status = key == NULL ? -1 : next_hash(hash_block, key, &hash);
        Py_XDECREF(key);
        if (status == 1)
            hashes[done++] = hash;
    }
    Error error = set_aside();
    if (done && append_words(SLOT(seq, _hashes), hashes, done) < 0)
        status = -1;
    take_up(error);
    PyMem_Free(copy);
    PyMem_Free(hashes);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The loop of `PrefixIndex._spread`: enter the nodes into a table of zeros. */
static PyObject *spread(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Index index;
    Array lookup = {0};
    if (open_index(args[0], &index) < 0)
        return NULL;
    if (open_array(args[1], &lookup) < 0) {
        close_index(&index);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < index.lookup.n; i++) {
        uint64_t entry = index.lookup.words[i];
        if (entry)
            enter(&lookup, entry >> 32, (uint32_t)entry);
    }
    close_array(&lookup);
    close_index(&index);
    Py_RETURN_NONE;
}

/* The loop of `PrefixCache.find` over blocks `first` to `stop`, whose hashes are known: the nodes after `parent`. */
static PyObject *find_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *seq = args[2], *nodes = PyList_New(0);
    uint64_t parent = PyLong_AsUnsignedLongLong(args[1]);
    Py_ssize_t first = PyLong_AsSsize_t(args[3]), stop = PyLong_AsSsize_t(args[4]), size = PyLong_AsSsize_t(args[5]);
    Index index;
    Array tokens = {0}, hashes = {0};
    if (PyErr_Occurred() || open_index(args[0], &index) < 0) {
        Py_XDECREF(nodes);
        return NULL;
    }
    if (open_array(SLOT(seq, _tokens), &tokens) < 0 || open_array(SLOT(seq, _hashes), &hashes) < 0)
        Py_CLEAR(nodes);
    for (Py_ssize_t i = first; nodes != NULL && i < stop && (i + 1) * size <= tokens.n && i < hashes.n; i++) {
        Record *record = find(&index, parent, (char *)(tokens.ints + i * size), hashes.words[i]);
        if (record == NULL)
            break;
        parent = record->node;
        PyObject *node = PyLong_FromUnsignedLongLong(parent);
        if (node == NULL || PyList_Append(nodes, node) < 0)
            Py_CLEAR(nodes);
        Py_XDECREF(node);
    }
    close_array(&tokens);
    close_array(&hashes);
    close_index(&index);
    return nodes;
}

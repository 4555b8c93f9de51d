/* The allocator's loops over blocks, tokens and rows, compiled.
 *
 * Nothing is specified here. Each function stands for the Python loop that its comment names, works on the same lists,
 * dicts and arrays, and does as much of the loop's work as is plain: it stops, having changed nothing for it, before the
 * first item that is anything else (an error, a node with several blocks, an array that somebody reads), and says how
 * far it has come. Its caller goes on from there in Python. So every error is raised by Python code, and each function
 * here may decline whatever would complicate it. An exception from here means that memory ran out, or a hash function
 * has failed.
 *
 * A view of an array's memory is never held while other code than ours could run: arrays can't grow under a view.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#define PLACE_BITS 32

#define NAMES(X) \
    X(_block) X(_buckets) X(_cached) X(_child) X(_collision) X(_content) X(_due) X(_empty) X(_free_places) X(_hash) \
    X(_hashes) X(_last_number) X(_length) X(_log) X(_log_start) X(_more_blocks) X(_namespaces) X(_next) X(_node) \
    X(_num_columns) X(_num_computed) X(_num_reserved) X(_num_steps) X(_older) X(_parent) X(_previous) X(_published) \
    X(_refs) X(_row) X(_settled_at) X(_starved) X(_table) X(_tables) X(_tokens) X(_younger) X(append) X(capacity) \
    X(clock) X(evictions) X(frombytes) X(max_length) X(media) X(num_blocks) X(num_reserved) X(published) \
    X(residency)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

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

/* The memory of an array of int32 or int64, while it is open. A struct that is all zeros is closed. */
typedef struct {
    Py_buffer view;
    int32_t *at;
    Py_ssize_t n;
} Ints;

static int open_array(PyObject *array, Ints *ints)
{
    if (PyObject_GetBuffer(array, &ints->view, PyBUF_WRITABLE) < 0)
        return -1;
    ints->at = ints->view.buf;
    ints->n = ints->view.len / ints->view.itemsize;
    return 0;
}

static int open_ints(PyObject *owner, PyObject *name, Ints *ints)
{
    PyObject *array = PyObject_GetAttr(owner, name);
    if (array == NULL)
        return -1;
    int status = open_array(array, ints); /* the view keeps the array alive */
    Py_DECREF(array);
    return status;
}

static void close_ints(Ints *ints)
{
    if (ints->view.obj != NULL)
        PyBuffer_Release(&ints->view);
    ints->at = NULL;
}

/* An attribute that is a list; a new reference. */
static PyObject *get_list(PyObject *owner, PyObject *name)
{
    PyObject *list = PyObject_GetAttr(owner, name);
    if (list != NULL && !PyList_CheckExact(list)) {
        PyErr_Format(PyExc_TypeError, "%U is no list", name);
        Py_CLEAR(list);
    }
    return list;
}

/* list[i] = item; takes a new reference. The replaced items are None, integers and bytes, whose end runs no code. */
static void put(PyObject *list, Py_ssize_t i, PyObject *item)
{
    PyObject *old = PyList_GET_ITEM(list, i);
    PyList_SET_ITEM(list, i, Py_NewRef(item));
    Py_DECREF(old);
}

static int same_number(PyObject *a, PyObject *b)
{
    if (a == b)
        return 1;
    int64_t x = PyLong_AsLongLong(a), y = PyLong_AsLongLong(b);
    if (PyErr_Occurred()) { /* more than 2^31 nodes ago: let Python compare */
        PyErr_Clear();
        int equal = PyObject_RichCompareBool(a, b, Py_EQ);
        if (equal < 0)
            PyErr_Clear();
        return equal > 0;
    }
    return x == y;
}

/* A block of a list; -1, which is none, for anything else. */
static int64_t block_at(PyObject *list, Py_ssize_t i)
{
    PyObject *block = PyList_GET_ITEM(list, i);
    int overflow;
    return PyLong_CheckExact(block) ? PyLong_AsLongLongAndOverflow(block, &overflow) : -1;
}

static Py_ssize_t place_of(PyObject *node)
{
    return (Py_ssize_t)(uint32_t)PyLong_AsUnsignedLongLongMask(node);
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

/* ---- PrefixIndex ---- */

typedef struct {
    Ints buckets, block, collision, child, older, younger;
    PyObject *node, *parent, *tokens, *hash;
    Py_ssize_t size; /* places below this one are in every array */
} Index;

static void close_index(Index *index)
{
    Ints *all[] = {&index->buckets, &index->block, &index->collision, &index->child, &index->older, &index->younger};
    for (int i = 0; i < 6; i++)
        close_ints(all[i]);
    Py_CLEAR(index->node);
    Py_CLEAR(index->parent);
    Py_CLEAR(index->tokens);
    Py_CLEAR(index->hash);
}

static int open_index(PyObject *self, Index *index)
{
    memset(index, 0, sizeof *index);
    if (open_ints(self, s__buckets, &index->buckets) < 0 || open_ints(self, s__block, &index->block) < 0 ||
        open_ints(self, s__collision, &index->collision) < 0 || open_ints(self, s__child, &index->child) < 0 ||
        open_ints(self, s__older, &index->older) < 0 || open_ints(self, s__younger, &index->younger) < 0 ||
        (index->node = get_list(self, s__node)) == NULL || (index->parent = get_list(self, s__parent)) == NULL ||
        (index->tokens = get_list(self, s__tokens)) == NULL || (index->hash = get_list(self, s__hash)) == NULL) {
        close_index(index);
        return -1;
    }
    index->size = PyList_GET_SIZE(index->tokens); /* `make_room` makes this one grow last */
    return 0;
}

static uint64_t bucket_of(Index *index, PyObject *hash)
{
    return PyLong_AsUnsignedLongLongMask(hash) & (uint64_t)(index->buckets.n - 1);
}

/* `PrefixIndex.find`: the place of exactly these tokens after exactly this parent, or 0. */
static Py_ssize_t find(Index *index, PyObject *parent, const char *tokens, Py_ssize_t length, PyObject *hash)
{
    Py_ssize_t place = index->buckets.at[bucket_of(index, hash)];
    while (place > 0 && place < index->size) {
        PyObject *key = PyList_GET_ITEM(index->tokens, place);
        if (same_number(PyList_GET_ITEM(index->parent, place), parent) && PyBytes_GET_SIZE(key) == length &&
            memcmp(PyBytes_AS_STRING(key), tokens, (size_t)length) == 0)
            return place;
        place = index->collision.at[place];
    }
    return 0;
}

/* ---- functions ---- */

/* `array("i", tokens)` of a list of token ids, see `token_array`; None when there is anything else in it. */
static PyObject *token_array(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *array_type = args[0], *tokens = args[1];
    Py_ssize_t n = PyList_GET_SIZE(tokens);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int32_t));
    if (bytes == NULL)
        return NULL;
    int32_t *to = (int32_t *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (i + 16 < n) /* sampled tokens lie far apart */
            __builtin_prefetch(PyList_GET_ITEM(tokens, i + 16));
        PyObject *token = PyList_GET_ITEM(tokens, i);
        int overflow;
        long value = PyLong_CheckExact(token) ? PyLong_AsLongAndOverflow(token, &overflow) : -1;
        if (value < 0 || value > INT32_MAX) {
            Py_DECREF(bytes);
            Py_RETURN_NONE;
        }
        to[i] = (int32_t)value;
    }
    PyObject *array = PyObject_CallFunction(array_type, "CO", 'i', bytes);
    Py_DECREF(bytes);
    return array;
}

/* `Sequence.keys` without media: the bytes of the blocks from `first` to `stop`. */
static PyObject *keys(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), stop = PyLong_AsSsize_t(args[2]), size = PyLong_AsSsize_t(args[3]);
    Ints tokens = {0};
    if (PyErr_Occurred() || open_array(SLOT(args[0], _tokens), &tokens) < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = first; list != NULL && i < stop && (i + 1) * size <= tokens.n; i++) {
        PyObject *key = PyBytes_FromStringAndSize((char *)(tokens.at + i * size), size * (Py_ssize_t)sizeof(int32_t));
        if (key == NULL || PyList_Append(list, key) < 0)
            Py_CLEAR(list);
        Py_XDECREF(key);
    }
    close_ints(&tokens);
    return list;
}

/* The loop of `PrefixCache.prepare`: append to `hashes` those of `keys` from `start` on, chained to `parent`. */
static PyObject *chain(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *hash_block = args[0], *keys = args[1], *hashes = args[3];
    Py_ssize_t start = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *hash = Py_NewRef(args[4]);
    for (Py_ssize_t i = start; i < PyList_GET_SIZE(keys); i++) {
        PyObject *call[] = {PyList_GET_ITEM(keys, i), hash};
        PyObject *next = PyObject_Vectorcall(hash_block, call, 2, NULL);
        Py_SETREF(hash, next);
        if (next == NULL || PyList_Append(hashes, next) < 0) {
            Py_XDECREF(next);
            return NULL;
        }
    }
    Py_DECREF(hash);
    Py_RETURN_NONE;
}

/* The loop of `PrefixIndex._spread`: sort the nodes into the buckets of an array of zeros. */
static PyObject *spread(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Index index;
    Ints buckets = {0};
    if (open_index(args[0], &index) < 0)
        return NULL;
    if (open_array(args[1], &buckets) < 0) {
        close_index(&index);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < index.buckets.n; i++)
        for (int32_t place = index.buckets.at[i], after; place; place = after) {
            uint64_t hash = PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(index.hash, place));
            int32_t *bucket = &buckets.at[hash & (uint64_t)(buckets.n - 1)];
            after = index.collision.at[place];
            index.collision.at[place] = *bucket;
            *bucket = place;
        }
    close_ints(&buckets);
    close_index(&index);
    Py_RETURN_NONE;
}

/* The loop of `PrefixCache.find` over blocks `first` to `stop`, whose hashes are known: the nodes after `parent`. */
static PyObject *find_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *parent = args[1], *seq = args[2], *hashes = SLOT(seq, _hashes);
    Py_ssize_t first = PyLong_AsSsize_t(args[3]), stop = PyLong_AsSsize_t(args[4]), size = PyLong_AsSsize_t(args[5]);
    Index index;
    Ints tokens = {0};
    if (PyErr_Occurred() || open_index(args[0], &index) < 0)
        return NULL;
    PyObject *nodes = open_array(SLOT(seq, _tokens), &tokens) < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = first; nodes != NULL && i < stop && (i + 1) * size <= tokens.n; i++) {
        PyObject *hash = i < PyList_GET_SIZE(hashes) ? PyList_GET_ITEM(hashes, i) : Py_None;
        if (!PyLong_CheckExact(hash))
            break;
        Py_ssize_t place = find(&index, parent, (char *)(tokens.at + i * size), size * 4, hash);
        if (place == 0)
            break;
        parent = PyList_GET_ITEM(index.node, place);
        if (PyList_Append(nodes, parent) < 0)
            Py_CLEAR(nodes);
    }
    close_ints(&tokens);
    close_index(&index);
    return nodes;
}

/* ---- BlockPool and its LRU ---- */

typedef struct {
    Ints refs, published; /* `published` is of int64 */
    PyObject *content;
    int64_t num_reserved, num_blocks, clock;
} Pool;

static void close_pool(Pool *pool)
{
    close_ints(&pool->refs);
    close_ints(&pool->published);
    Py_CLEAR(pool->content);
}

static int open_pool(PyObject *self, Pool *pool)
{
    memset(pool, 0, sizeof *pool);
    if (open_ints(self, s__refs, &pool->refs) < 0 || open_ints(self, s__published, &pool->published) < 0 ||
        (pool->content = get_list(self, s__content)) == NULL ||
        (pool->num_reserved = get_int(self, s_num_reserved)) < 0 ||
        (pool->num_blocks = get_int(self, s_num_blocks)) < 0 || (pool->clock = get_int(self, s_clock)) < 0) {
        close_pool(pool);
        return -1;
    }
    return 0;
}

static int is_block(Pool *pool, int64_t block)
{
    return pool->num_reserved <= block && block < pool->num_blocks;
}

/* The pool's eviction policy while it is exactly `LRU`; else a ring of no length, on which nothing can be done. */
typedef struct {
    PyObject *policy;
    Ints next, previous;
    int64_t length;
} Ring;

static int open_ring(PyObject *pool, PyObject *lru, Ring *ring)
{
    memset(ring, 0, sizeof *ring);
    ring->policy = PyObject_GetAttr(pool, s__cached);
    if (ring->policy == NULL)
        return -1;
    if ((PyObject *)Py_TYPE(ring->policy) != lru)
        return 0;
    if (open_ints(ring->policy, s__next, &ring->next) < 0 || open_ints(ring->policy, s__previous, &ring->previous) < 0)
        return -1;
    return (ring->length = get_int(ring->policy, s__length)) < 0 ? -1 : 0;
}

/* Also of one that could not be opened; `status` is handed on. */
static int close_ring(Ring *ring, int status)
{
    if (status == 0 && ring->next.at != NULL)
        status = set_int(ring->policy, s__length, ring->length);
    close_ints(&ring->next);
    close_ints(&ring->previous);
    Py_CLEAR(ring->policy);
    return status;
}

static int ring_has_room(Ring *ring, int64_t block)
{
    return block + 1 < ring->next.n;
}

/* `LRU.insert`, where there is room. */
static void ring_insert(Ring *ring, int32_t block)
{
    int32_t place = block + 1, last = ring->previous.at[0];
    ring->next.at[last] = ring->previous.at[0] = place;
    ring->previous.at[place] = last;
    ring->next.at[place] = 0;
    ring->length++;
}

/* `LRU.remove`. */
static void ring_remove(Ring *ring, int32_t block)
{
    int32_t after = ring->next.at[block + 1], before = ring->previous.at[block + 1];
    ring->next.at[before] = after;
    ring->previous.at[after] = before;
    ring->length--;
}

/* Make an array `more` elements longer, before the first change, and cut it to what was used, after the last one. */
static Py_ssize_t lengthen(PyObject *array, Py_ssize_t more)
{
    Py_ssize_t length = PyObject_Size(array);
    PyObject *zeros = PyBytes_FromStringAndSize(NULL, more * (Py_ssize_t)sizeof(int32_t));
    PyObject *done = length < 0 || zeros == NULL ? NULL : PyObject_CallMethodOneArg(array, s_frombytes, zeros);
    Py_XDECREF(zeros);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return length;
}

static int cut(PyObject *array, Py_ssize_t length)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* of the error, if any, that this cleans up after */
    int status = PySequence_DelSlice(array, length, PY_SSIZE_T_MAX);
    if (status == 0)
        PyErr_Restore(type, value, traceback);
    return status;
}

/* The loop at the end of `BlockPool.take`: one reference each. */
static PyObject *refer(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Ints refs = {0};
    if (open_ints(args[0], s__refs, &refs) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) {
        int64_t block = block_at(args[1], i);
        if (block >= 0 && block < refs.n)
            refs.at[block] = 1;
    }
    close_ints(&refs);
    Py_RETURN_NONE;
}

/* `BlockPool.share` for the first blocks of a list; returns for how many. */
static PyObject *share_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *self = args[0], *blocks = args[2];
    Pool pool;
    Ring ring;
    Py_ssize_t done = 0;
    if (open_pool(self, &pool) < 0)
        return NULL;
    int status = open_ring(self, args[1], &ring);
    for (; status == 0 && done < PyList_GET_SIZE(blocks); done++) {
        int64_t block = block_at(blocks, done);
        if (!is_block(&pool, block))
            break;
        if (pool.refs.at[block] == 0) {
            if (PyList_GET_ITEM(pool.content, block) == Py_None || !ring_has_room(&ring, block))
                break;
            ring_remove(&ring, (int32_t)block);
        }
        pool.refs.at[block]++;
    }
    status = close_ring(&ring, status);
    close_pool(&pool);
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

/* `BlockPool.release` for the first blocks of a list; returns for how many. */
static PyObject *release_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *self = args[0], *blocks = args[2];
    Py_ssize_t done = 0, n = PyList_GET_SIZE(blocks);
    PyObject *empty = PyObject_GetAttr(self, s__empty);
    if (empty == NULL)
        return NULL;
    Py_ssize_t num_empty = lengthen(empty, n);
    if (num_empty < 0) {
        Py_DECREF(empty);
        return NULL;
    }
    Pool pool = {0};
    Ring ring = {0};
    Ints stack = {0};
    int status = open_pool(self, &pool) < 0 || open_ring(self, args[1], &ring) < 0 || open_array(empty, &stack) < 0 ? -1 : 0;
    for (; status == 0 && done < n; done++) {
        int64_t block = block_at(blocks, done);
        if (!is_block(&pool, block) || pool.refs.at[block] <= 0)
            break;
        if (pool.refs.at[block] == 1) {
            if (PyList_GET_ITEM(pool.content, block) == Py_None)
                stack.at[num_empty++] = (int32_t)block;
            else if (ring_has_room(&ring, block))
                ring_insert(&ring, (int32_t)block);
            else
                break;
        }
        pool.refs.at[block]--;
    }
    status = close_ring(&ring, status);
    close_pool(&pool);
    close_ints(&stack);
    if (cut(empty, num_empty) < 0)
        status = -1;
    Py_DECREF(empty);
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

/* ---- PrefixCache: pool and index together ---- */

/* `PrefixIndex._forget` and `_close_gap` for a node without children, where something is left of its family. */
static void forget_leaf(Index *index, Py_ssize_t place)
{
    Py_ssize_t bucket = (Py_ssize_t)bucket_of(index, PyList_GET_ITEM(index->hash, place));
    int32_t *link = &index->buckets.at[bucket];
    while (*link != place)
        link = &index->collision.at[*link];
    *link = index->collision.at[place];
    int32_t older = index->older.at[place], younger = index->younger.at[place];
    if (older)
        index->younger.at[older] = younger;
    if (younger)
        index->older.at[younger] = older;
    else
        index->child.at[place_of(PyList_GET_ITEM(index->parent, place))] = older;
    index->collision.at[place] = index->child.at[place] = index->older.at[place] = index->younger.at[place] = 0;
}

/* Whether evicting `block`, which carries `node`, is `forget_leaf`: one block, no children, no root that goes too. */
static int is_plain_leaf(Index *index, PyObject *more_blocks, PyObject *namespaces, int64_t block, PyObject *node)
{
    Py_ssize_t place = place_of(node);
    if (place <= 0 || place >= index->size || !same_number(PyList_GET_ITEM(index->node, place), node) ||
        index->child.at[place] || index->block.at[place] != block || PyDict_Contains(more_blocks, node))
        return 0;
    int only_child = !index->older.at[place] && !index->younger.at[place];
    return !only_child || !PyDict_Contains(namespaces, PyList_GET_ITEM(index->parent, place));
}

/* The loop of `BlockPool._take_and_evict` with `PrefixCache._evicted`, while LRU evicts plain leaves: the blocks. */
static PyObject *evict_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *pool_object = args[0], *index_object = args[1], *counters = args[2];
    Py_ssize_t n = PyLong_AsSsize_t(args[4]), num_free;
    if (n < 0)
        return NULL;
    PyObject *no_tokens = PyBytes_FromStringAndSize(NULL, 0); /* there is one of it, which always is there */
    PyObject *more_blocks = PyObject_GetAttr(index_object, s__more_blocks);
    PyObject *namespaces = PyObject_GetAttr(index_object, s__namespaces);
    PyObject *free_places = PyObject_GetAttr(index_object, s__free_places);
    PyObject *blocks = PyList_New(0);
    if (!more_blocks || !namespaces || !free_places || !blocks || (num_free = lengthen(free_places, n)) < 0) {
        Py_XDECREF(more_blocks);
        Py_XDECREF(namespaces);
        Py_XDECREF(free_places);
        Py_XDECREF(blocks);
        Py_XDECREF(no_tokens);
        return NULL;
    }
    Pool pool = {0};
    Index index = {0};
    Ring ring = {0};
    Ints places = {0};
    int64_t residency = 0, evictions = 0;
    int status = open_pool(pool_object, &pool) < 0 || open_index(index_object, &index) < 0 ||
                         open_ring(pool_object, args[3], &ring) < 0 || open_array(free_places, &places) < 0
                     ? -1
                     : 0;
    for (; status == 0 && evictions < n && ring.next.at != NULL && ring.length > 0; evictions++) {
        int32_t block = ring.next.at[0] - 1;
        if (!is_block(&pool, block) || pool.refs.at[block] != 0)
            break;
        PyObject *node = PyList_GET_ITEM(pool.content, block);
        if (!PyLong_CheckExact(node) || !is_plain_leaf(&index, more_blocks, namespaces, block, node))
            break;
        PyObject *number = PyLong_FromLong(block);
        if (number == NULL || PyList_Append(blocks, number) < 0) { /* Python will find the memory short, too */
            Py_XDECREF(number);
            PyErr_Clear();
            break;
        }
        Py_DECREF(number);
        Py_ssize_t place = place_of(node);
        ring_remove(&ring, block);
        forget_leaf(&index, place);
        put(index.tokens, place, no_tokens);
        put(pool.content, block, Py_None);
        places.at[num_free++] = (int32_t)place;
        pool.clock++;
        residency += pool.clock - ((int64_t *)pool.published.at)[block];
    }
    status = close_ring(&ring, status);
    close_ints(&places);
    close_index(&index);
    int64_t clock = pool.clock;
    close_pool(&pool);
    if (cut(free_places, num_free) < 0)
        status = -1;
    if (status == 0 && evictions)
        status = set_int(pool_object, s_clock, clock) < 0 ||
                         set_int(counters, s_evictions, get_int(counters, s_evictions) + evictions) < 0 ||
                         set_int(counters, s_residency, get_int(counters, s_residency) + residency) < 0
                     ? -1
                     : 0;
    Py_DECREF(no_tokens);
    Py_DECREF(more_blocks);
    Py_DECREF(namespaces);
    Py_DECREF(free_places);
    if (status < 0)
        Py_CLEAR(blocks);
    return blocks;
}

/* Index and pool while blocks are published. */
typedef struct {
    Index index;
    Pool pool;
    PyObject *index_object, *free_places;
    Ints places;
    Py_ssize_t num_free;
    int64_t last_number;
} Press;

static int close_press(Press *press, int status)
{
    if (press->places.at != NULL) {
        close_ints(&press->places);
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (cut(press->free_places, press->num_free) < 0 ||
            set_int(press->index_object, s__last_number, press->last_number) < 0)
            status = -1;
        else
            PyErr_Restore(type, value, traceback);
    }
    Py_CLEAR(press->free_places);
    close_index(&press->index);
    close_pool(&press->pool);
    return status;
}

static int open_press(PyObject *index_object, PyObject *pool_object, Press *press)
{
    memset(press, 0, sizeof *press);
    press->index_object = index_object;
    press->free_places = PyObject_GetAttr(index_object, s__free_places);
    if (press->free_places == NULL || open_index(index_object, &press->index) < 0 ||
        open_pool(pool_object, &press->pool) < 0 ||
        (press->last_number = get_int(index_object, s__last_number)) < 0 ||
        open_array(press->free_places, &press->places) < 0)
        return close_press(press, -1);
    press->num_free = press->places.n;
    return 0;
}

/* Whether `publish_block` can be called for `block`, or Python must say what is wrong. */
static int can_publish(Press *press, int64_t block, PyObject *parent, PyObject *key, PyObject *hash)
{
    return is_block(&press->pool, block) && press->pool.refs.at[block] > 0 &&
           PyList_GET_ITEM(press->pool.content, block) == Py_None && press->num_free > 0 &&
           press->last_number < INT32_MAX && place_of(parent) < press->index.size && PyBytes_CheckExact(key) &&
           PyLong_CheckExact(hash);
}

/* `PrefixIndex.add` and `BlockPool.publish`; returns the node, borrowed from the index. */
static PyObject *publish_block(Press *press, int64_t block, PyObject *parent, PyObject *key, PyObject *hash)
{
    Index *index = &press->index;
    int32_t place = press->places.at[press->num_free - 1];
    PyObject *node = PyLong_FromUnsignedLongLong((uint64_t)(press->last_number + 1) << PLACE_BITS | (uint32_t)place);
    if (node == NULL)
        return NULL;
    press->num_free--;
    press->last_number++;
    put(index->node, place, node);
    put(index->parent, place, parent);
    put(index->tokens, place, key);
    put(index->hash, place, hash);
    index->block.at[place] = (int32_t)block;
    int32_t *bucket = &index->buckets.at[bucket_of(index, hash)];
    index->collision.at[place] = *bucket;
    *bucket = place;
    int32_t *youngest = &index->child.at[place_of(parent)];
    if (*youngest) {
        index->older.at[place] = *youngest;
        index->younger.at[*youngest] = place;
    }
    *youngest = place;
    put(press->pool.content, block, node);
    ((int64_t *)press->pool.published.at)[block] = press->pool.clock;
    Py_DECREF(node);
    return node;
}

/* Ask for the memory that publishing `block` will touch, in two steps: near is soon to come, else a little later. A run
 * of blocks is scattered over all of it, and waiting for it is most of what publishing costs. */
static void prefetch(Press *press, Py_ssize_t ahead, int32_t block, PyObject *hash, int near)
{
    Index *index = &press->index;
    if (press->num_free <= ahead || !is_block(&press->pool, block) || !PyLong_CheckExact(hash))
        return;
    int32_t place = press->places.at[press->num_free - 1 - ahead];
    int32_t *bucket = &index->buckets.at[bucket_of(index, hash)];
    PyObject **lists[] = {((PyListObject *)index->node)->ob_item, ((PyListObject *)index->parent)->ob_item,
                          ((PyListObject *)index->hash)->ob_item, ((PyListObject *)index->tokens)->ob_item};
    if (near) {
        for (int i = 0; i < 3; i++)
            __builtin_prefetch(lists[i][place]);
        __builtin_prefetch(lists[1] + *bucket);
        return;
    }
    for (int i = 0; i < 4; i++)
        __builtin_prefetch(lists[i] + place);
    __builtin_prefetch(bucket);
    __builtin_prefetch(&index->block.at[place]);
    __builtin_prefetch(&index->collision.at[place]);
    __builtin_prefetch(&index->child.at[place]);
    __builtin_prefetch(&press->pool.refs.at[block]);
    __builtin_prefetch((int64_t *)press->pool.published.at + block);
    __builtin_prefetch(((PyListObject *)press->pool.content)->ob_item + block);
}

/* The loop of `PrefixCache.publish`, which fills `duplicates`; returns how many keys it has done and the last node. */
static PyObject *publish_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *parent = args[2], *seq = args[3], *keys = args[5], *duplicates = args[6];
    Py_ssize_t first = PyLong_AsSsize_t(args[4]), done = 0;
    if (PyErr_Occurred())
        return NULL;
    Press press;
    Ints table = {0};
    if (open_press(args[0], args[1], &press) < 0)
        return NULL;
    PyObject *hashes = SLOT(seq, _hashes);
    int status = open_array(SLOT(seq, _table), &table);
    Py_INCREF(parent);
    for (; status == 0 && done < PyList_GET_SIZE(keys); done++) {
        Py_ssize_t i = first + done;
        PyObject *key = PyList_GET_ITEM(keys, done);
        if (i >= table.n || i >= PyList_GET_SIZE(hashes))
            break;
        PyObject *hash = PyList_GET_ITEM(hashes, i), *node;
        for (int near = 0; near < 2; near++) {
            Py_ssize_t ahead = near ? 6 : 12;
            if (i + ahead < table.n && i + ahead < PyList_GET_SIZE(hashes))
                prefetch(&press, ahead, table.at[i + ahead], PyList_GET_ITEM(hashes, i + ahead), near);
        }
        if (!can_publish(&press, table.at[i], parent, key, hash))
            break;
        Py_ssize_t place = find(&press.index, parent, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), hash);
        if (place) {
            node = PyList_GET_ITEM(press.index.node, place);
            PyObject *entry = PyLong_FromSsize_t(i);
            if (entry == NULL || PyDict_SetItem(duplicates, entry, node) < 0)
                status = -1;
            Py_XDECREF(entry);
        } else if ((node = publish_block(&press, table.at[i], parent, key, hash)) == NULL)
            status = -1;
        if (status == 0)
            Py_SETREF(parent, Py_NewRef(node));
    }
    close_ints(&table);
    status = close_press(&press, status);
    PyObject *result = status < 0 ? NULL : Py_BuildValue("nO", done, parent);
    Py_DECREF(parent);
    return result;
}

/* ---- DecodeBatch ---- */

/* `DecodeBatch._schedule` without a window. */
static int schedule(PyObject *due, PyObject *seq, int64_t step, int64_t num_computed, int64_t num_reserved, int64_t size)
{
    int64_t left = num_reserved - num_computed, to_end = size - num_computed % size;
    PyObject *at = PyLong_FromLongLong(step + (left < to_end ? left : to_end));
    if (at == NULL)
        return -1;
    int status = 0;
    Py_SETREF(SLOT(seq, _due), Py_NewRef(at));
    PyObject *bucket = PyDict_GetItemWithError(due, at);
    if (bucket != NULL)
        status = PyDict_SetItem(bucket, seq, Py_None);
    else if (status == 0 && !PyErr_Occurred()) {
        bucket = PyDict_New();
        if (bucket == NULL || PyDict_SetItem(bucket, seq, Py_None) < 0 || PyDict_SetItem(due, at, bucket) < 0)
            status = -1;
        Py_XDECREF(bucket);
    } else
        status = -1;
    Py_DECREF(at);
    return status;
}

/* `DecodeBatch._settle`, with the batch's log, in which `num_steps` is the number of steps since its start. */
static int settle(PyObject *seq, Ints *log, int64_t log_start, int64_t num_steps, int64_t capacity)
{
    int64_t settled_at = GET(seq, _settled_at), row = GET(seq, _row), num_computed = GET(seq, _num_computed);
    int64_t behind = num_steps - settled_at, first = (settled_at - log_start) * capacity + row;
    if (PyErr_Occurred())
        return -1;
    if (behind <= 0 || first < 0 || first + (behind - 1) * capacity >= log->n)
        return 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, behind * (Py_ssize_t)sizeof(int32_t));
    if (bytes == NULL)
        return -1;
    int32_t *to = (int32_t *)PyBytes_AS_STRING(bytes);
    for (int64_t i = 0; i < behind; i++)
        to[i] = log->at[first + i * capacity];
    PyObject *done = PyObject_CallMethodOneArg(SLOT(seq, _tokens), s_frombytes, bytes);
    Py_DECREF(bytes);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return SET(seq, _num_computed, num_computed + behind) < 0 ? -1 : SET(seq, _settled_at, num_steps);
}

/* `PrefixCache.prepare` for the block that one token more will fill. Returns its key in a list, an empty list when none
 * will be full, and None for one without a predecessor or with media. */
static PyObject *prepare_next(PyObject *seq, PyObject *hash_block, int64_t size)
{
    int64_t num_computed = GET(seq, _num_computed);
    if (num_computed < 0)
        return NULL;
    if (hash_block == Py_None || (num_computed + 1) % size)
        return PyList_New(0);
    int64_t i = num_computed / size;
    PyObject *hashes = Py_NewRef(SLOT(seq, _hashes)), *key = NULL, *hash = NULL, *result = NULL;
    Ints tokens = {0};
    if (open_array(SLOT(seq, _tokens), &tokens) < 0)
        goto end;
    Py_ssize_t num_hashes = PyList_GET_SIZE(hashes);
    if (PyObject_Size(SLOT(seq, media)) != 0 || i == 0 || num_hashes < i || num_hashes > i + 1 || tokens.n < (i + 1) * size) {
        close_ints(&tokens);
        result = Py_NewRef(Py_None);
        goto end;
    }
    key = PyBytes_FromStringAndSize((char *)(tokens.at + i * size), size * (Py_ssize_t)sizeof(int32_t));
    close_ints(&tokens);
    if (key == NULL)
        goto end;
    if (num_hashes == i) {
        PyObject *before = Py_NewRef(PyList_GET_ITEM(hashes, i - 1));
        PyObject *call[] = {key, before};
        hash = PyObject_Vectorcall(hash_block, call, 2, NULL);
        Py_DECREF(before);
        if (hash == NULL || PyList_Append(hashes, hash) < 0)
            goto end;
    }
    if ((result = PyList_New(1)) != NULL)
        PyList_SET_ITEM(result, 0, Py_NewRef(key));
end:
    Py_DECREF(hashes);
    Py_XDECREF(key);
    Py_XDECREF(hash);
    return result;
}

/* The first loop of `DecodeBatch.commit`, over rows from the `start`-th on: pairs of a sequence and its keys. */
static PyObject *prepare_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *batch = args[0], *rows = args[1], *hash_block = args[3];
    Py_ssize_t start = PyLong_AsSsize_t(args[2]);
    int64_t size = PyLong_AsLongLong(args[4]), num_steps = get_int(batch, s__num_steps), capacity = get_int(batch, s_capacity);
    int64_t log_start = get_int(batch, s__log_start);
    Ints log = {0};
    int status = PyErr_Occurred() ? -1 : open_ints(batch, s__log, &log);
    for (Py_ssize_t i = start; status == 0 && i < PyList_GET_SIZE(rows); i++)
        status = settle(PyList_GET_ITEM(rows, i), &log, log_start, num_steps, capacity);
    close_ints(&log);
    PyObject *due = status < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = start; due != NULL && i < PyList_GET_SIZE(rows); i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        PyObject *keys = prepare_next(seq, hash_block, size);
        if (keys == Py_None) {
            Py_DECREF(keys);
            break;
        }
        PyObject *pair = keys == NULL ? NULL : PyTuple_Pack(2, seq, keys);
        if (pair == NULL || PyList_Append(due, pair) < 0)
            Py_CLEAR(due);
        Py_XDECREF(pair);
        Py_XDECREF(keys);
    }
    return due;
}

/* One round of `commit_rows`: 1 when it is done, 0 when it is Python's, -1 for an error. */
static int commit_row(PyObject *batch, PyObject *due, PyObject *starved, Press *press, PyObject *seq, PyObject *keys,
                      int32_t token, int64_t step, int64_t size)
{
    int64_t num_computed = GET(seq, _num_computed) + 1, num_reserved = GET(seq, _num_reserved), block = -1;
    PyObject *parent = NULL, *hash = NULL, *key = NULL, *hashes = SLOT(seq, _hashes), *done = NULL, *number = NULL;
    int status = -1;
    if (PyErr_Occurred())
        return -1;
    if (PyList_GET_SIZE(keys)) {
        Py_ssize_t i = num_computed / size - 1;
        Ints table = {0};
        if (open_array(SLOT(seq, _table), &table) < 0)
            goto end;
        status = 0;
        int64_t before = 0 < i && i < table.n ? table.at[i - 1] : -1;
        block = before < 0 ? -1 : table.at[i];
        close_ints(&table);
        if (!is_block(&press->pool, before) || i >= PyList_GET_SIZE(hashes))
            goto end;
        parent = PyList_GET_ITEM(press->pool.content, before);
        hash = PyList_GET_ITEM(hashes, i);
        key = PyList_GET_ITEM(keys, 0);
        if (!PyLong_CheckExact(parent) || !can_publish(press, block, parent, key, hash) ||
            find(&press->index, parent, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), hash))
            goto end;
        status = -1;
    }
    if ((number = PyLong_FromLong(token)) == NULL ||
        (done = PyObject_CallMethodOneArg(SLOT(seq, _tokens), s_append, number)) == NULL ||
        SET(seq, _num_computed, num_computed) < 0 || SET(seq, _settled_at, step) < 0 ||
        (key != NULL && publish_block(press, block, parent, key, hash) == NULL))
        goto end;
    status = num_reserved == num_computed ? PyDict_SetItem(starved, seq, Py_None)
                                          : schedule(due, seq, step, num_computed, num_reserved, size);
    if (status == 0)
        status = 1;
end:
    Py_XDECREF(number);
    Py_XDECREF(done);
    return status;
}

/* The second loop of `DecodeBatch.commit` without window and events, over the pairs from `start` on, while each has a
 * findable predecessor and is no duplicate. Returns how many pairs are done then. */
static PyObject *commit_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *batch = args[0], *pairs = args[3], *counters = args[7];
    Py_ssize_t done = PyLong_AsSsize_t(args[4]);
    int64_t size = PyLong_AsLongLong(args[6]), step = get_int(batch, s__num_steps), published = 0;
    if (PyErr_Occurred())
        return NULL;
    Press press;
    Ints sampled = {0};
    if (open_press(args[1], args[2], &press) < 0)
        return NULL;
    PyObject *due = PyObject_GetAttr(batch, s__due), *starved = PyObject_GetAttr(batch, s__starved);
    int status = due == NULL || starved == NULL || open_array(args[5], &sampled) < 0 ? -1 : 0;
    for (; status >= 0 && done < PyList_GET_SIZE(pairs); done++) {
        PyObject *seq = PyTuple_GET_ITEM(PyList_GET_ITEM(pairs, done), 0);
        PyObject *keys = PyTuple_GET_ITEM(PyList_GET_ITEM(pairs, done), 1);
        int64_t row = GET(seq, _row);
        status = row < 0 || row >= sampled.n
                     ? -1
                     : commit_row(batch, due, starved, &press, seq, keys, sampled.at[row], step, size);
        if (status < 1)
            break;
        published += PyList_GET_SIZE(keys);
    }
    close_ints(&sampled);
    Py_XDECREF(due);
    Py_XDECREF(starved);
    status = close_press(&press, status);
    if (published && set_int(counters, s_published, get_int(counters, s_published) + published) < 0)
        status = -1;
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

/* The longest block table of `starved`, or -1 when a sequence is at its `max_length`. */
static PyObject *longest_table(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t at = 0, longest = 0, length;
    PyObject *seq;
    while (PyDict_Next(args[0], &at, &seq, NULL)) {
        if (SLOT(seq, max_length) != Py_None && GET(seq, max_length) == GET(seq, _num_computed))
            return PyLong_FromLong(-1);
        if ((length = PyObject_Size(SLOT(seq, _table))) > longest)
            longest = length;
    }
    return PyLong_FromSsize_t(longest);
}

/* The loop of `DecodeBatch.reserve` without a window: `blocks` for the first of `rows`; returns for how many. */
static PyObject *serve_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *batch = args[0], *rows = args[1], *blocks = args[2], *due;
    int64_t size = PyLong_AsLongLong(args[3]), step = get_int(batch, s__num_steps);
    int64_t num_columns = get_int(batch, s__num_columns);
    Py_ssize_t done = 0;
    Ints tables = {0};
    if (PyErr_Occurred() || (due = PyObject_GetAttr(batch, s__due)) == NULL)
        return NULL;
    int status = open_ints(batch, s__tables, &tables);
    for (; status == 0 && done < PyList_GET_SIZE(rows); done++) {
        PyObject *seq = PyList_GET_ITEM(rows, done), *block = PyList_GET_ITEM(blocks, done);
        int64_t num_computed = GET(seq, _num_computed), num_reserved = GET(seq, _num_reserved);
        int64_t row = GET(seq, _row), end = num_reserved + size;
        PyObject *max_length = SLOT(seq, max_length), *table = SLOT(seq, _table);
        Py_ssize_t entry = PyObject_Size(table);
        status = -1;
        if (entry >= 0 && !PyErr_Occurred()) {
            if (max_length != Py_None && PyLong_AsLongLong(max_length) < end)
                end = PyLong_AsLongLong(max_length);
            int fits = entry < num_columns && row * num_columns + entry < tables.n;
            PyObject *added = fits ? PyObject_CallMethodOneArg(table, s_append, block) : NULL;
            if (added == NULL && (!fits || PyErr_ExceptionMatches(PyExc_BufferError))) {
                PyErr_Clear();
                status = 1; /* Python makes another table */
            } else if (added != NULL && SET(seq, _num_reserved, end) == 0) {
                tables.at[row * num_columns + entry] = (int32_t)PyLong_AsLong(block);
                status = schedule(due, seq, step, num_computed, end, size);
            }
            Py_XDECREF(added);
        }
        if (status != 0)
            break;
    }
    close_ints(&tables);
    Py_DECREF(due);
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(token_array), FUNCTION(keys),        FUNCTION(chain),       FUNCTION(find_run),     FUNCTION(refer),
    FUNCTION(share_run),   FUNCTION(release_run), FUNCTION(evict_run),   FUNCTION(publish_run),  FUNCTION(prepare_rows),
    FUNCTION(commit_rows), FUNCTION(serve_rows),  FUNCTION(spread),      FUNCTION(bind),        FUNCTION(longest_table),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvproof.allocator._loops", NULL, -1, functions};

PyMODINIT_FUNC PyInit__loops(void)
{
#define INTERN(name) \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return NULL;
    NAMES(INTERN)
    return PyModule_Create(&module);
}

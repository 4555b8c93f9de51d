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
    X(_buckets) X(_cached) X(_content) X(_due) X(_empty) X(_free_places) X(_hashes) X(_key_size) X(_keys) X(_last_number) \
    X(_length) X(_links) X(_log) X(_more_blocks) X(_more_key) X(_num_columns) X(_num_computed) \
    X(_num_reserved) X(_num_steps) X(_prepare_row) X(_publish_row) X(_published) X(_records) X(_refs) X(_row) X(_rows) X(_serve_row) X(_settled_at) X(_starved) \
    X(_table) X(_tables) X(_tokens) X(append) X(capacity) X(clock) X(evictions) X(frombytes) X(max_length) X(media) \
    X(num_free) X(num_reserved) X(published) X(residency)

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

/* ---- PrefixIndex ---- */

typedef struct {
    uint64_t node, parent, hash, block, collision, child, older, younger;
} Record;

#define WORDS ((Py_ssize_t)(sizeof(Record) / sizeof(uint64_t)))

typedef struct {
    Array records, keys, buckets;
    PyObject *more_key;
    Py_ssize_t key_size;
} Index;

static void close_index(Index *index)
{
    close_array(&index->records);
    close_array(&index->keys);
    close_array(&index->buckets);
    Py_CLEAR(index->more_key);
}

static int open_index(PyObject *self, Index *index)
{
    memset(index, 0, sizeof *index);
    if (open_attribute(self, s__records, &index->records) < 0 || open_attribute(self, s__keys, &index->keys) < 0 ||
        open_attribute(self, s__buckets, &index->buckets) < 0 ||
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

static Record *record_of(Index *index, uint64_t node)
{
    return record_at(index, (uint32_t)node);
}

static char *key_at(Index *index, uint64_t place)
{
    return index->keys.bytes + (Py_ssize_t)place / WORDS * index->key_size;
}

static uint32_t *bucket_of(Index *index, uint64_t hash)
{
    return &index->buckets.places[hash & (uint64_t)(index->buckets.n - 1)];
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
    for (uint64_t place = *bucket_of(index, hash); place; place = record_at(index, place)->collision) {
        Record *record = record_at(index, place);
        if (record->parent == parent && memcmp(key_at(index, place), key, (size_t)index->key_size) == 0 &&
            !has(index->more_key, record->node))
            return record;
    }
    return NULL;
}

/* ---- functions ---- */

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

/* `hash_block(key, parent_hash)`, or 0 with an exception set. */
static uint64_t hash_of(PyObject *hash_block, PyObject *key, uint64_t parent_hash)
{
    PyObject *seed = PyLong_FromUnsignedLongLong(parent_hash);
    if (seed == NULL)
        return 0;
    PyObject *call[] = {key, seed};
    PyObject *hash = PyObject_Vectorcall(hash_block, call, 2, NULL);
    Py_DECREF(seed);
    if (hash == NULL)
        return 0;
    uint64_t value = PyLong_AsUnsignedLongLong(hash);
    Py_DECREF(hash);
    return PyErr_Occurred() ? 0 : value;
}

/* Whether an exception may say that a hash is no 64-bit word, which Python says better. */
static int is_refusal(void)
{
    if (!PyErr_Occurred())
        return 0;
    return PyErr_ExceptionMatches(PyExc_OverflowError) || PyErr_ExceptionMatches(PyExc_TypeError);
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
    if (PyErr_Occurred())
        return NULL;
    if (n <= 0)
        Py_RETURN_NONE;
    if (last_word(SLOT(seq, _hashes), &hash) < 0 || open_array(SLOT(seq, _tokens), &tokens) < 0)
        return NULL;
    if (stop <= tokens.n / size && (copy = PyMem_New(int32_t, n * size)) != NULL && (hashes = PyMem_New(uint64_t, n)) != NULL)
        memcpy(copy, tokens.ints + first * size, (size_t)(n * size) * sizeof *copy);
    close_array(&tokens);
    for (; hashes != NULL && done < n; done++) {
        PyObject *key = PyBytes_FromStringAndSize((char *)(copy + done * size), size * (Py_ssize_t)sizeof *copy);
        hash = key == NULL ? 0 : hash_of(hash_block, key, hash);
        Py_XDECREF(key);
        if (hash == 0 && PyErr_Occurred())
            break;
        hashes[done] = hash;
    }
    int status = done == n || is_refusal() ? 0 : -1;
    if (status == 0) {
        PyErr_Clear();
        status = append_words(SLOT(seq, _hashes), hashes, done);
    } else if (!PyErr_Occurred())
        PyErr_NoMemory();
    PyMem_Free(copy);
    PyMem_Free(hashes);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The loop of `PrefixIndex._spread`: sort the nodes into the buckets of an array of zeros. */
static PyObject *spread(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Index index;
    Array buckets = {0};
    if (open_index(args[0], &index) < 0)
        return NULL;
    if (open_array(args[1], &buckets) < 0) {
        close_index(&index);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < index.buckets.n; i++)
        for (uint64_t place = index.buckets.places[i], after; place; place = after) {
            Record *record = record_at(&index, place);
            uint32_t *bucket = &buckets.places[record->hash & (uint64_t)(buckets.n - 1)];
            after = record->collision;
            record->collision = *bucket;
            *bucket = (uint32_t)place;
        }
    close_array(&buckets);
    close_index(&index);
    Py_RETURN_NONE;
}

/* The loop of `PrefixCache.find` over blocks `first` to `stop`, whose hashes are known: the nodes after `parent`. */
static PyObject *find_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *seq = args[2], *nodes = NULL;
    uint64_t parent = PyLong_AsUnsignedLongLong(args[1]);
    Py_ssize_t first = PyLong_AsSsize_t(args[3]), stop = PyLong_AsSsize_t(args[4]), size = PyLong_AsSsize_t(args[5]);
    Index index;
    Array tokens = {0}, hashes = {0};
    if (PyErr_Occurred() || open_index(args[0], &index) < 0)
        return NULL;
    if (open_array(SLOT(seq, _tokens), &tokens) == 0 && open_array(SLOT(seq, _hashes), &hashes) == 0)
        nodes = PyList_New(0);
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

/* ---- BlockPool and its LRU ---- */

typedef struct {
    Array refs, content, published;
    int64_t num_reserved, clock;
} Pool;

static void close_pool(Pool *pool)
{
    close_array(&pool->refs);
    close_array(&pool->content);
    close_array(&pool->published);
}

static int open_pool(PyObject *self, Pool *pool)
{
    memset(pool, 0, sizeof *pool);
    if (open_attribute(self, s__refs, &pool->refs) < 0 || open_attribute(self, s__content, &pool->content) < 0 ||
        open_attribute(self, s__published, &pool->published) < 0 ||
        (pool->num_reserved = get_int(self, s_num_reserved)) < 0 || (pool->clock = get_int(self, s_clock)) < 0) {
        close_pool(pool);
        return -1;
    }
    return 0;
}

static int is_block(Pool *pool, int64_t block)
{
    return pool->num_reserved <= block && block < pool->refs.n;
}

/* The pool's eviction policy while it is exactly `LRU`; else a ring of no length, on which nothing can be done. */
typedef struct {
    PyObject *policy;
    Array links;
    int64_t length;
} Ring;

typedef struct {
    int32_t next, previous;
} Link;

static int open_ring(PyObject *pool, PyObject *lru, Ring *ring)
{
    memset(ring, 0, sizeof *ring);
    ring->policy = PyObject_GetAttr(pool, s__cached);
    if (ring->policy == NULL)
        return -1;
    if ((PyObject *)Py_TYPE(ring->policy) != lru)
        return 0;
    if (open_attribute(ring->policy, s__links, &ring->links) < 0)
        return -1;
    return (ring->length = get_int(ring->policy, s__length)) < 0 ? -1 : 0;
}

/* Also of one that could not be opened; `status` is handed on. */
static int close_ring(Ring *ring, int status)
{
    if (status == 0 && ring->links.ints != NULL)
        status = set_int(ring->policy, s__length, ring->length);
    close_array(&ring->links);
    Py_CLEAR(ring->policy);
    return status;
}

static int ring_has_room(Ring *ring, int64_t block)
{
    return 2 * (block + 1) < ring->links.n;
}

/* `LRU.insert`, where there is room. */
static void ring_insert(Ring *ring, int32_t block)
{
    Link *links = (Link *)ring->links.ints;
    int32_t place = block + 1, last = links[0].previous;
    links[last].next = links[0].previous = place;
    links[place] = (Link){.next = 0, .previous = last};
    ring->length++;
}

/* `LRU.remove`. */
static void ring_remove(Ring *ring, int32_t block)
{
    Link *links = (Link *)ring->links.ints, link = links[block + 1];
    links[link.previous].next = link.next;
    links[link.next].previous = link.previous;
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
        if (pool.refs.ints[block] == 0) {
            if (pool.content.words[block] == 0 || !ring_has_room(&ring, block))
                break;
            ring_remove(&ring, (int32_t)block);
        }
        pool.refs.ints[block]++;
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
    Array stack = {0};
    int status = open_pool(self, &pool) < 0 || open_ring(self, args[1], &ring) < 0 || open_array(empty, &stack) < 0 ? -1 : 0;
    for (; status == 0 && done < n; done++) {
        int64_t block = block_at(blocks, done);
        if (!is_block(&pool, block) || pool.refs.ints[block] <= 0)
            break;
        if (pool.refs.ints[block] == 1) {
            if (pool.content.words[block] == 0)
                stack.ints[num_empty++] = (int32_t)block;
            else if (ring_has_room(&ring, block))
                ring_insert(&ring, (int32_t)block);
            else
                break;
        }
        pool.refs.ints[block]--;
    }
    status = close_ring(&ring, status);
    close_pool(&pool);
    close_array(&stack);
    if (cut(empty, num_empty) < 0)
        status = -1;
    Py_DECREF(empty);
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

/* ---- PrefixCache: pool and index together ---- */

/* `PrefixIndex._forget` and `_close_gap` for a node without children, where something is left of its family. */
static void forget_leaf(Index *index, uint64_t place)
{
    Record *leaf = record_at(index, place);
    uint32_t *bucket = bucket_of(index, leaf->hash);
    if (*bucket == place)
        *bucket = (uint32_t)leaf->collision;
    else {
        Record *before = record_at(index, *bucket);
        while (before->collision != place)
            before = record_at(index, before->collision);
        before->collision = leaf->collision;
    }
    if (leaf->older)
        record_at(index, leaf->older)->younger = leaf->younger;
    if (leaf->younger)
        record_at(index, leaf->younger)->older = leaf->older;
    else
        record_of(index, leaf->parent)->child = leaf->older;
    memset(leaf, 0, sizeof *leaf);
}

/* Whether evicting `block`, which carries `node`, is `forget_leaf`: one block, no children, no root that goes too. */
static int is_plain_leaf(Index *index, PyObject *more_blocks, int64_t block, uint64_t node)
{
    Record *leaf = record_of(index, node);
    if (leaf->child || (int64_t)leaf->block != block || has(more_blocks, node) || has(index->more_key, node))
        return 0;
    return leaf->older || leaf->younger || record_of(index, leaf->parent)->parent != 0;
}

/* A number in a list of them, with a reference to its block. */
static int hand_out(Pool *pool, PyObject *blocks, int32_t block)
{
    PyObject *number = PyLong_FromLong(block);
    int status = number == NULL ? -1 : PyList_Append(blocks, number);
    Py_XDECREF(number);
    if (status == 0)
        pool->refs.ints[block] = 1;
    return status;
}

/* Ask for the memory that evicting the blocks after this place in the ring will touch: where a link leads, then what
 * is there, is known one step at a time. */
static int32_t prefetch_leaf(Pool *pool, Index *index, Ring *ring, int32_t place)
{
    if (place == 0)
        return 0;
    int32_t next = ((Link *)ring->links.ints)[place].next, block = place - 1;
    __builtin_prefetch(&((Link *)ring->links.ints)[next]);
    if (next) {
        __builtin_prefetch(&pool->content.words[next - 1]);
        __builtin_prefetch(&pool->refs.ints[next - 1], 1);
        __builtin_prefetch(&pool->published.words[next - 1]);
    }
    uint64_t node = pool->content.words[block];
    __builtin_prefetch(record_of(index, node), 1);
    return next;
}

/* `BlockPool.take` of `n` with `PrefixCache._evicted`: those without content, then what LRU evicts while that are plain
 * leaves. It may hand out fewer, and hands out none where Python must refuse. */
static PyObject *take_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *pool_object = args[0], *index_object = args[1], *counters = args[2], *blocks = PyList_New(0);
    PyObject *more_blocks = NULL, *free_places = NULL;
    PyObject *empty = PyObject_GetAttr(pool_object, s__empty);
    Py_ssize_t n = PyLong_CheckExact(args[4]) ? PyLong_AsSsize_t(args[4]) : 0, num_free = -1, done = 0;
    Pool pool = {0};
    Index index = {0};
    Ring ring = {0};
    Array stack = {0}, places = {0};
    int64_t residency = 0, evictions = 0;
    if (PyErr_Occurred()) { /* no such number of blocks */
        PyErr_Clear();
        n = 0;
    }
    int status = blocks == NULL || empty == NULL || open_pool(pool_object, &pool) < 0 || open_ring(pool_object, args[3], &ring) < 0 ||
                         open_array(empty, &stack) < 0
                     ? -1
                     : 0;
    Py_ssize_t num_empty = stack.n;
    if (n > num_empty + ring.length)
        n = 0;
    for (; status == 0 && done < n && num_empty; done++)
        status = hand_out(&pool, blocks, stack.ints[--num_empty]);
    close_array(&stack);
    if (done && cut(empty, num_empty) < 0)
        status = -1;
    if (status == 0 && done < n) {
        if ((more_blocks = PyObject_GetAttr(index_object, s__more_blocks)) == NULL ||
            (free_places = PyObject_GetAttr(index_object, s__free_places)) == NULL ||
            open_index(index_object, &index) < 0 || (num_free = lengthen(free_places, n - done)) < 0 ||
            open_array(free_places, &places) < 0)
            status = -1;
        int32_t ahead = status == 0 && ring.length > 0 ? ((Link *)ring.links.ints)->next : 0;
        for (int i = 0; i < 6; i++)
            ahead = prefetch_leaf(&pool, &index, &ring, ahead);
        for (; status == 0 && done < n && ring.length > 0; done++, evictions++) {
            int32_t block = ((Link *)ring.links.ints)->next - 1;
            ahead = prefetch_leaf(&pool, &index, &ring, ahead);
            uint64_t node = is_block(&pool, block) && pool.refs.ints[block] == 0 ? pool.content.words[block] : 0;
            if (node == 0 || !is_plain_leaf(&index, more_blocks, block, node))
                break;
            if ((status = hand_out(&pool, blocks, block)) < 0)
                break;
            ring_remove(&ring, block);
            forget_leaf(&index, (uint32_t)node);
            pool.content.words[block] = 0;
            places.places[num_free++] = (uint32_t)node;
            residency += pool.clock + done + 1 - (int64_t)pool.published.words[block];
        }
        close_array(&places);
        close_index(&index);
        if (num_free >= 0 && cut(free_places, num_free) < 0)
            status = -1;
    }
    int64_t clock = pool.clock + done;
    status = close_ring(&ring, status);
    close_pool(&pool);
    if (status == 0 && done)
        status = set_int(pool_object, s_clock, clock);
    if (status == 0 && evictions)
        status = set_int(counters, s_evictions, get_int(counters, s_evictions) + evictions) < 0 ||
                         set_int(counters, s_residency, get_int(counters, s_residency) + residency) < 0
                     ? -1
                     : 0;
    Py_XDECREF(empty);
    Py_XDECREF(more_blocks);
    Py_XDECREF(free_places);
    if (status < 0)
        Py_CLEAR(blocks);
    return blocks;
}

/* Index and pool while blocks are published. */
typedef struct {
    Index index;
    Pool pool;
    PyObject *index_object, *free_places;
    Array places;
    Py_ssize_t num_free;
    int64_t last_number;
} Press;

static int close_press(Press *press, int status)
{
    if (press->places.ints != NULL) {
        close_array(&press->places);
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
static int can_publish(Press *press, int64_t block)
{
    return is_block(&press->pool, block) && press->pool.refs.ints[block] > 0 && press->pool.content.words[block] == 0 &&
           press->num_free > 0 && press->last_number < INT32_MAX;
}

/* `PrefixIndex.add` and `BlockPool.publish`; returns the node. */
static uint64_t publish_block(Press *press, int64_t block, uint64_t parent, const char *key, uint64_t hash)
{
    Index *index = &press->index;
    uint32_t place = press->places.places[--press->num_free], *bucket = bucket_of(index, hash);
    Record *above = record_of(index, parent);
    uint64_t node = (uint64_t)++press->last_number << PLACE_BITS | place;
    *record_at(index, place) = (Record){.node = node, .parent = parent, .hash = hash, .block = (uint64_t)block,
                                        .collision = *bucket, .older = above->child};
    memcpy(key_at(index, place), key, (size_t)index->key_size);
    *bucket = place;
    if (above->child)
        record_at(index, above->child)->younger = place;
    above->child = place;
    press->pool.content.words[block] = node;
    press->pool.published.words[block] = (uint64_t)press->pool.clock;
    return node;
}

/* Ask for the memory that publishing `block` will touch. A run of blocks is scattered over all of it, and waiting for
 * it is most of what publishing costs. */
static void prefetch(Press *press, Py_ssize_t ahead, int32_t block, uint64_t hash)
{
    Index *index = &press->index;
    if (press->num_free <= ahead || !is_block(&press->pool, block))
        return;
    uint32_t place = press->places.places[press->num_free - 1 - ahead];
    __builtin_prefetch(record_at(index, place), 1);
    __builtin_prefetch(key_at(index, place), 1);
    __builtin_prefetch(bucket_of(index, hash), 1);
    __builtin_prefetch(&press->pool.refs.ints[block]);
    __builtin_prefetch(&press->pool.content.words[block], 1);
    __builtin_prefetch(&press->pool.published.words[block], 1);
}

/* The loop of `PrefixCache.publish` without media over blocks `i` to `stop`, which fills `duplicates`; returns the block
 * it has come to and the last node. */
static PyObject *publish_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { AHEAD = 8 };
    PyObject *seq = args[3], *duplicates = args[6];
    uint64_t parent = PyLong_AsUnsignedLongLong(args[2]);
    Py_ssize_t i = PyLong_AsSsize_t(args[4]), stop = PyLong_AsSsize_t(args[5]);
    if (PyErr_Occurred())
        return NULL;
    Press press;
    Array table = {0}, hashes = {0}, tokens = {0};
    if (open_press(args[0], args[1], &press) < 0)
        return NULL;
    Index *index = &press.index;
    int status = open_array(SLOT(seq, _table), &table) < 0 || open_array(SLOT(seq, _hashes), &hashes) < 0 ||
                         open_array(SLOT(seq, _tokens), &tokens) < 0
                     ? -1
                     : 0;
    if (status < 0 || stop > table.n || stop > hashes.n || stop > tokens.n * 4 / index->key_size)
        stop = i;
    for (; status == 0 && i < stop; i++) {
        const char *key = tokens.bytes + i * index->key_size;
        if (i + AHEAD < stop)
            prefetch(&press, AHEAD, table.ints[i + AHEAD], hashes.words[i + AHEAD]);
        if (!can_publish(&press, table.ints[i]))
            break;
        Record *record = find(index, parent, key, hashes.words[i]);
        if (record == NULL) {
            parent = publish_block(&press, table.ints[i], parent, key, hashes.words[i]);
            continue;
        }
        parent = record->node;
        PyObject *entry = PyLong_FromSsize_t(i), *node = PyLong_FromUnsignedLongLong(parent);
        if (entry == NULL || node == NULL || PyDict_SetItem(duplicates, entry, node) < 0)
            status = -1;
        Py_XDECREF(entry);
        Py_XDECREF(node);
    }
    close_array(&table);
    close_array(&hashes);
    close_array(&tokens);
    status = close_press(&press, status);
    return status < 0 ? NULL : Py_BuildValue("nK", i, (unsigned long long)parent);
}

/* ---- DecodeBatch ---- */

/* `DecodeBatch._schedule` without a window; `log_steps` is how far the batch's log goes back. */
static int schedule(PyObject *due, PyObject *seq, int64_t step, int64_t num_computed, int64_t num_reserved, int64_t size,
                    int64_t log_steps)
{
    int64_t left = num_reserved - num_computed, to_end = size - num_computed % size;
    left = left < to_end ? left : to_end;
    PyObject *at = PyLong_FromLongLong(step + (left < log_steps ? left : log_steps));
    if (at == NULL)
        return -1;
    int status = -1;
    Py_SETREF(SLOT(seq, _due), Py_NewRef(at));
    PyObject *bucket = PyDict_GetItemWithError(due, at);
    if (bucket != NULL)
        status = PyDict_SetItem(bucket, seq, Py_None);
    else if (!PyErr_Occurred() && (bucket = PyDict_New()) != NULL) {
        if (PyDict_SetItem(bucket, seq, Py_None) == 0)
            status = PyDict_SetItem(due, at, bucket);
        Py_DECREF(bucket);
    }
    Py_DECREF(at);
    return status;
}

/* Ask for what a row keeps, on which its turn is about to wait: first where it is, then what is there. */
static void prefetch_row(PyObject *rows, Py_ssize_t i)
{
    PyObject *row;
    if (i + 2 < PyList_GET_SIZE(rows)) {
        row = PyList_GET_ITEM(rows, i + 2);
        __builtin_prefetch(row);
        __builtin_prefetch((char *)row + 64);
        __builtin_prefetch((char *)row + 128);
    }
    if (i + 1 < PyList_GET_SIZE(rows)) {
        row = PyList_GET_ITEM(rows, i + 1);
        PyObject *parts[] = {SLOT(row, _tokens), SLOT(row, _table), SLOT(row, _hashes), SLOT(row, _num_computed),
                             SLOT(row, _num_reserved), SLOT(row, _settled_at), SLOT(row, _row)};
        for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
            __builtin_prefetch(parts[part]);
    }
}

/* `DecodeBatch._settle`, with the batch's log. */
static int settle(PyObject *seq, Array *log, int64_t num_steps, int64_t capacity)
{
    int64_t settled_at = GET(seq, _settled_at), row = GET(seq, _row), num_computed = GET(seq, _num_computed);
    int64_t behind = num_steps - settled_at, log_steps = log->n / capacity;
    if (PyErr_Occurred())
        return -1;
    if (behind <= 0 || behind > log_steps || row < 0 || row >= capacity)
        return 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, behind * (Py_ssize_t)sizeof(int32_t));
    if (bytes == NULL)
        return -1;
    int32_t *to = (int32_t *)PyBytes_AS_STRING(bytes);
    for (int64_t i = 0, at = settled_at % log_steps; i < behind; i++) {
        to[i] = log->ints[at * capacity + row];
        at = at + 1 == log_steps ? 0 : at + 1;
    }
    PyObject *done = PyObject_CallMethodOneArg(SLOT(seq, _tokens), s_frombytes, bytes);
    Py_DECREF(bytes);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    return SET(seq, _num_computed, num_computed + behind) < 0 ? -1 : SET(seq, _settled_at, num_steps);
}

/* `BlockManager._prepare` for one token more: 1 when it is done, 0 where it is Python's, -1 for an error. */
static int prepare_next(PyObject *seq, PyObject *hash_block, int64_t size)
{
    int64_t num_computed = GET(seq, _num_computed), i = num_computed / size;
    Py_ssize_t num_hashes = PyObject_Size(SLOT(seq, _hashes)), num_media = PyObject_Size(SLOT(seq, media));
    Array tokens = {0};
    uint64_t hash;
    if (PyErr_Occurred())
        return -1;
    if (hash_block == Py_None || (num_computed + 1) % size || num_hashes > i)
        return 1;
    if (num_media || num_hashes < i || i == 0)
        return 0;
    if (last_word(SLOT(seq, _hashes), &hash) < 0 || open_array(SLOT(seq, _tokens), &tokens) < 0)
        return -1;
    int known = (i + 1) * size <= tokens.n;
    PyObject *key = known ? PyBytes_FromStringAndSize((char *)(tokens.ints + i * size), size * 4) : Py_NewRef(Py_None);
    close_array(&tokens);
    if (key == NULL)
        return -1;
    if (known)
        hash = hash_of(hash_block, key, hash);
    Py_DECREF(key);
    int refused = is_refusal();
    if (refused)
        PyErr_Clear();
    if (!known || refused)
        return 0;
    return PyErr_Occurred() || append_words(SLOT(seq, _hashes), &hash, 1) < 0 ? -1 : 1;
}

/* The keys of a dict of rows, in the order of their rows. */
static PyObject *rows_in_order(PyObject *dict)
{
    PyObject *rows = PyDict_Keys(dict);
    for (Py_ssize_t i = 1; rows != NULL && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        Py_ssize_t at = i;
        for (int64_t number = GET(row, _row); at && GET(PyList_GET_ITEM(rows, at - 1), _row) > number; at--)
            PyList_SET_ITEM(rows, at, PyList_GET_ITEM(rows, at - 1));
        PyList_SET_ITEM(rows, at, row);
    }
    return rows;
}

/* A batch in an operation. */
typedef struct {
    PyObject *batch, *index, *pool, *hash_block, *due, *starved;
    Press press;
    int64_t step, size, log_steps, published;
} Batch;

/* What can fail of a commit's work on its rows. */
static int prepare_rows(Batch *batch, PyObject *rows, Array *log, int64_t capacity)
{
    Py_ssize_t n = PyList_GET_SIZE(rows);
    PyObject *done = PyObject_CallMethod(batch->index, "make_room", "n", 2 * n); /* for blocks, and perhaps roots */
    int status = done == NULL ? -1 : 1;
    Py_XDECREF(done);
    if (status < 0 || open_attribute(batch->batch, s__log, log) < 0)
        return -1;
    for (Py_ssize_t i = 0; status >= 0 && i < n; i++, prefetch_row(rows, i))
        status = settle(PyList_GET_ITEM(rows, i), log, batch->step - 1, capacity);
    batch->log_steps = log->n / capacity;
    close_array(log);
    for (Py_ssize_t i = 0; status >= 0 && i < n; i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        status = prepare_next(seq, batch->hash_block, batch->size);
        if (status == 0) {
            done = PyObject_CallMethodOneArg(batch->batch, s__prepare_row, seq);
            status = done == NULL ? -1 : 1;
            Py_XDECREF(done);
        }
    }
    return status;
}

/* `DecodeBatch._publish_row` without window, events and merges: 1 when it is done, 0 where it is Python's, -1 for an
 * error. */
static int publish_row(Batch *batch, PyObject *seq, int32_t token)
{
    Press *press = &batch->press;
    int64_t size = batch->size, num_computed = GET(seq, _num_computed) + 1, num_reserved = GET(seq, _num_reserved);
    Py_ssize_t i = num_computed / size - 1;
    PyObject *done = NULL, *number = PyLong_FromLong(token);
    Array table = {0}, hashes = {0}, tokens = {0};
    int status = number == NULL || PyErr_Occurred() ? -1 : 1;
    if (status == 1 && GET(seq, _settled_at) != batch->step - 1)
        status = 0; /* somebody has looked at it, and it has its token */
    if (status == 1 && batch->hash_block != Py_None && num_computed % size == 0) {
        if (open_array(SLOT(seq, _table), &table) < 0 || open_array(SLOT(seq, _hashes), &hashes) < 0 ||
            open_array(SLOT(seq, _tokens), &tokens) < 0)
            status = -1;
        else {
            int known = 0 < i && i < table.n && i < hashes.n && (i + 1) * size <= tokens.n &&
                        PyObject_Size(SLOT(seq, media)) == 0;
            int64_t before = known ? table.ints[i - 1] : -1;
            uint64_t parent = is_block(&press->pool, before) ? press->pool.content.words[before] : 0;
            const char *key = (const char *)(tokens.ints + i * size);
            status = parent && can_publish(press, table.ints[i]) &&
                     !find(&press->index, parent, key, hashes.words[i]);
            if (status) {
                publish_block(press, table.ints[i], parent, key, hashes.words[i]);
                batch->published++;
            }
        }
        close_array(&table);
        close_array(&hashes);
        close_array(&tokens);
    }
    if (status == 1) {
        done = PyObject_CallMethodOneArg(SLOT(seq, _tokens), s_append, number);
        if (done == NULL || SET(seq, _num_computed, num_computed) < 0 || SET(seq, _settled_at, batch->step) < 0 ||
            (num_reserved == num_computed
                 ? PyDict_SetItem(batch->starved, seq, Py_None)
                 : schedule(batch->due, seq, batch->step, num_computed, num_reserved, size, batch->log_steps)) < 0)
            status = -1;
    }
    Py_XDECREF(number);
    Py_XDECREF(done);
    return status;
}

/* The rows' part of a commit that has happened; `merges` is a list. */
static int publish_rows(Batch *batch, PyObject *rows, const int32_t *sampled, int plain, PyObject *merges)
{
    int status = 1, open = 0;
    for (Py_ssize_t i = 0; status >= 0 && i < PyList_GET_SIZE(rows); i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        status = 0;
        if (plain) {
            if (!open && open_press(batch->index, batch->pool, &batch->press) < 0)
                return -1;
            open = 1;
            status = publish_row(batch, seq, sampled[GET(seq, _row)]);
        }
        if (status == 0) {
            if (open && close_press(&batch->press, 0) < 0)
                return -1;
            open = 0;
            PyObject *done = PyObject_CallMethodObjArgs(batch->batch, s__publish_row, seq, merges, NULL);
            status = done == NULL ? -1 : 1;
            Py_XDECREF(done);
        }
    }
    return open ? close_press(&batch->press, status < 0 ? -1 : 0) : status;
}

/* `DecodeBatch.commit` of a list of tokens; None, and nothing has happened, where that must be refused. */
static PyObject *commit_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *tokens = args[1], *counters = args[6], *number = NULL, *bucket = NULL, *rows = NULL, *merges = NULL;
    Batch batch = {.batch = args[0], .index = args[2], .pool = args[3], .hash_block = args[4],
                     .size = PyLong_AsLongLong(args[5]), .step = get_int(args[0], s__num_steps) + 1};
    int64_t capacity = get_int(batch.batch, s_capacity);
    int plain = args[7] == Py_True;
    Array log = {0};
    int32_t *sampled = NULL;
    PyObject *all = PyObject_GetAttr(batch.batch, s__rows);
    batch.due = PyObject_GetAttr(batch.batch, s__due);
    batch.starved = PyObject_GetAttr(batch.batch, s__starved);
    Py_ssize_t n = PyList_CheckExact(tokens) ? PyList_GET_SIZE(tokens) : -1;
    if (PyErr_Occurred())
        goto end;
    if (n != PyList_GET_SIZE(all) || PyDict_GET_SIZE(batch.starved) != 0)
        n = -1;
    if (n >= 0 && (sampled = PyMem_New(int32_t, n + 1)) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    if (n < 0 || !read_tokens(tokens, sampled)) {
        merges = Py_NewRef(Py_None);
        goto end;
    }
    if ((number = PyLong_FromLongLong(batch.step)) == NULL)
        goto end;
    if ((bucket = PyDict_GetItemWithError(batch.due, number)) != NULL) {
        if ((rows = rows_in_order(bucket)) == NULL || prepare_rows(&batch, rows, &log, capacity) < 0)
            goto end;
    } else if (PyErr_Occurred())
        goto end;
    if ((merges = PyList_New(0)) == NULL || open_attribute(batch.batch, s__log, &log) < 0)
        goto failed;
    memcpy(log.ints + (batch.step - 1) % (log.n / capacity) * capacity, sampled, (size_t)n * sizeof *sampled);
    close_array(&log);
    if (PyObject_SetAttr(batch.batch, s__num_steps, number) < 0)
        goto failed;
    if (rows != NULL && (PyDict_DelItem(batch.due, number) < 0 || publish_rows(&batch, rows, sampled, plain, merges) < 0))
        goto failed;
    if (batch.published && set_int(counters, s_published, get_int(counters, s_published) + batch.published) < 0)
        goto failed;
    goto end;
failed:
    Py_CLEAR(merges);
end:
    PyMem_Free(sampled);
    Py_XDECREF(number);
    Py_XDECREF(rows);
    Py_XDECREF(all);
    Py_XDECREF(batch.due);
    Py_XDECREF(batch.starved);
    return merges;
}

/* A row of a batch without a window gets one block more: 0 when it has, 1 where that is Python's, -1 for an error. */
static int serve_row(Batch *batch, PyObject *seq, PyObject *block, Array *tables, int64_t num_columns)
{
    int64_t num_computed = GET(seq, _num_computed), end = GET(seq, _num_reserved) + batch->size;
    PyObject *max_length = SLOT(seq, max_length), *table = SLOT(seq, _table);
    Py_ssize_t entry = PyObject_Size(table);
    int64_t at = GET(seq, _row) * num_columns + entry;
    if (PyErr_Occurred())
        return -1;
    if (entry >= num_columns || at >= tables->n)
        return 1;
    if (max_length != Py_None && PyLong_AsLongLong(max_length) < end)
        end = PyLong_AsLongLong(max_length);
    PyObject *added = PyObject_CallMethodOneArg(table, s_append, block);
    if (added == NULL && PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Clear();
        return 1; /* Python makes another table */
    }
    if (added == NULL)
        return -1;
    Py_DECREF(added);
    tables->ints[at] = (int32_t)PyLong_AsLong(block);
    if (SET(seq, _num_reserved, end) < 0)
        return -1;
    return schedule(batch->due, seq, batch->step, num_computed, end, batch->size, batch->log_steps);
}

/* Whether every row of a list can be given a block as it is: its table has room in `num_columns`, and it is not at its
 * `max_length`. */
static int can_serve(PyObject *rows, int64_t num_columns)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++, prefetch_row(rows, i)) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        if (SLOT(seq, max_length) != Py_None && GET(seq, max_length) == GET(seq, _num_computed))
            return 0;
        if (PyObject_Size(SLOT(seq, _table)) >= num_columns)
            return 0;
    }
    return 1;
}

/* `DecodeBatch.reserve` of rows that all get a block; None, and nothing has happened, where it is Python's. */
static PyObject *reserve_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Batch batch = {.batch = args[0], .pool = args[1], .size = PyLong_AsLongLong(args[2]),
                    .step = get_int(args[0], s__num_steps)};
    int64_t num_columns = get_int(batch.batch, s__num_columns), capacity = get_int(batch.batch, s_capacity);
    PyObject *rows = NULL, *blocks = NULL, *number = NULL, *left = NULL;
    Array tables = {0}, log = {0};
    batch.due = PyObject_GetAttr(batch.batch, s__due);
    batch.starved = PyObject_GetAttr(batch.batch, s__starved);
    if (PyErr_Occurred() || (rows = rows_in_order(batch.starved)) == NULL)
        goto end;
    Py_ssize_t n = PyList_GET_SIZE(rows);
    number = PyObject_GetAttr(batch.pool, s_num_free);
    if (number == NULL || PyLong_AsSsize_t(number) < n || !can_serve(rows, num_columns)) {
        left = number == NULL ? NULL : Py_NewRef(Py_None);
        goto end;
    }
    if ((blocks = PyObject_CallMethod(batch.pool, "take", "n", n)) == NULL ||
        open_attribute(batch.batch, s__log, &log) < 0 || open_attribute(batch.batch, s__tables, &tables) < 0)
        goto end;
    batch.log_steps = log.n / capacity;
    int status = 0;
    for (Py_ssize_t i = 0; status >= 0 && i < n; i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i), *block = PyList_GET_ITEM(blocks, i);
        status = serve_row(&batch, seq, block, &tables, num_columns);
        if (status == 1) {
            PyObject *done = PyObject_CallMethodObjArgs(batch.batch, s__serve_row, seq, block, NULL);
            status = done == NULL ? -1 : 0;
            Py_XDECREF(done);
        }
    }
    if (status == 0) {
        PyDict_Clear(batch.starved);
        left = PyList_New(0);
    }
end:
    close_array(&tables);
    close_array(&log);
    Py_XDECREF(rows);
    Py_XDECREF(blocks);
    Py_XDECREF(number);
    Py_XDECREF(batch.due);
    Py_XDECREF(batch.starved);
    return left;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(bind),        FUNCTION(token_array), FUNCTION(hash_run),    FUNCTION(find_run),
    FUNCTION(spread),      FUNCTION(share_run),   FUNCTION(release_run), FUNCTION(take_run),
    FUNCTION(publish_run), FUNCTION(commit_batch), FUNCTION(reserve_batch),
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

/* `BlockPool` and its LRU. Part of _loops.c. */

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
    Error error = set_aside();
    if (cut(empty, num_empty) < 0)
        status = -1;
    take_up(error);
    Py_DECREF(empty);
    return status < 0 ? NULL : PyLong_FromSsize_t(done);
}

/* `PrefixCache`: pool and index together. Part of _loops.c. */

/* `PrefixIndex._forget` and `_close_gap` for a node without children, where something is left of its family. */
static void forget_leaf(Index *index, uint64_t place)
{
    Record *leaf = record_at(index, place);
    leave(&index->lookup, tag_of(leaf->hash), place);
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
    if (!is_alive(index, node) || leaf->child || (int64_t)leaf->block != block)
        return 0;
    if (has(more_blocks, node) || has(index->more_key, node))
        return 0;
    return leaf->older || leaf->younger || record_of(index, leaf->parent)->parent != 0;
}

/* A block gets a reference, and a list its number; 0 where there is no memory for that, and nothing has happened. */
static int hand_out(Pool *pool, PyObject *blocks, int32_t block)
{
    PyObject *number = PyLong_FromLong(block);
    int status = number == NULL ? -1 : PyList_Append(blocks, number);
    Py_XDECREF(number);
    if (status < 0) {
        PyErr_Clear();
        return 0;
    }
    pool->refs.ints[block] = 1;
    return 1;
}

/* The blocks that will be evicted soon, and those of them whose memory has been asked for up to the record. */
typedef struct {
    int32_t place;
    unsigned count;
    uint64_t nodes[4];
} Ahead;

/* Ask for the memory that evicting a block will touch, a step further in the ring: where the next link leads, what is
 * there, and what that leads to become known one after the other. */
static void look_ahead(Pool *pool, Index *index, Ring *ring, Ahead *ahead)
{
    uint64_t node = 0, before = ahead->nodes[(ahead->count + 1) % 4];
    if (ahead->place != 0 && is_block(pool, ahead->place - 1)) {
        node = pool->content.words[ahead->place - 1];
        ahead->place = ((Link *)ring->links.ints)[ahead->place].next;
        __builtin_prefetch(&((Link *)ring->links.ints)[ahead->place]);
        if (ahead->place) {
            __builtin_prefetch(&pool->content.words[ahead->place - 1]);
            __builtin_prefetch(&pool->refs.ints[ahead->place - 1], 1);
            __builtin_prefetch(&pool->published.words[ahead->place - 1]);
        }
        __builtin_prefetch(record_of(index, node), 1);
    }
    if (before && is_alive(index, before))
        __builtin_prefetch(entry_of(index, record_of(index, before)->hash), 1);
    ahead->nodes[ahead->count++ % 4] = node;
}

/* `BlockPool.take` of `n` with `PrefixCache._evicted`: those without content, then what LRU evicts while that are plain
 * leaves. It may hand out fewer, and hands out none where Python must refuse. */
static PyObject *take_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *pool_object = args[0], *index_object = args[1], *counters = args[2], *blocks = PyList_New(0);
    PyObject *more_blocks = NULL, *free_places = NULL;
    PyObject *empty = PyObject_GetAttr(pool_object, s__empty);
    int overflow;
    int64_t n = PyLong_CheckExact(args[4]) ? PyLong_AsLongLongAndOverflow(args[4], &overflow) : 0, done = 0;
    Py_ssize_t num_free = -1;
    Pool pool = {0};
    Index index = {0};
    Ring ring = {0};
    Array stack = {0}, places = {0};
    int64_t residency = 0, evictions = 0;
    int status = blocks == NULL || empty == NULL || open_pool(pool_object, &pool) < 0 ||
                         open_ring(pool_object, args[3], &ring) < 0 || open_array(empty, &stack) < 0
                     ? -1
                     : 0;
    Py_ssize_t num_empty = stack.n;
    if (status < 0 || n > num_empty + ring.length)
        n = 0;
    if (n > num_empty &&
        ((more_blocks = PyObject_GetAttr(index_object, s__more_blocks)) == NULL ||
         (free_places = PyObject_GetAttr(index_object, s__free_places)) == NULL ||
         open_index(index_object, &index) < 0 || (num_free = lengthen(free_places, n - num_empty)) < 0 ||
         open_array(free_places, &places) < 0)) {
        status = -1;
        n = 0;
    }
    while (done < n && num_empty && hand_out(&pool, blocks, stack.ints[num_empty - 1])) {
        num_empty--;
        done++;
    }
    if (done < n && num_empty == 0) {
        Ahead ahead = {.place = ring.length > 0 ? ((Link *)ring.links.ints)->next : 0};
        for (int i = 0; i < 7; i++)
            look_ahead(&pool, &index, &ring, &ahead);
        for (; done < n && ring.length > 0; done++, evictions++) {
            int32_t block = ((Link *)ring.links.ints)->next - 1;
            look_ahead(&pool, &index, &ring, &ahead);
            uint64_t node = is_block(&pool, block) && pool.refs.ints[block] == 0 ? pool.content.words[block] : 0;
            if (node == 0 || !is_plain_leaf(&index, more_blocks, block, node) || !hand_out(&pool, blocks, block))
                break;
            ring_remove(&ring, block);
            forget_leaf(&index, place_of(node));
            pool.content.words[block] = 0;
            places.places[num_free++] = place_of(node);
            residency += pool.clock + done + 1 - (int64_t)pool.published.words[block];
        }
    }
    int64_t clock = pool.clock + done;
    close_array(&stack);
    close_array(&places);
    close_index(&index);
    status = close_ring(&ring, status);
    close_pool(&pool);
    Error error = set_aside();
    if ((done && cut(empty, num_empty) < 0) || (num_free >= 0 && cut(free_places, num_free) < 0) ||
        (done && set_int(pool_object, s_clock, clock) < 0) ||
        (evictions && (set_int(counters, s_evictions, get_int(counters, s_evictions) + evictions) < 0 ||
                       set_int(counters, s_residency, get_int(counters, s_residency) + residency) < 0)))
        status = -1;
    take_up(error);
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
        Error error = set_aside();
        if (cut(press->free_places, press->num_free) < 0 ||
            set_int(press->index_object, s__last_number, press->last_number) < 0)
            status = -1;
        take_up(error);
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
           press->num_free > 0 && press->last_number < MAX_NUMBER;
}

/* `PrefixIndex.add` and `BlockPool.publish`; returns the node. */
static uint64_t publish_block(Press *press, int64_t block, uint64_t parent, const char *key, uint64_t hash)
{
    Index *index = &press->index;
    uint32_t place = press->places.places[--press->num_free];
    Record *above = record_of(index, parent);
    uint64_t node = (uint64_t)++press->last_number << PLACE_BITS | place >> 3;
    *record_at(index, place) = (Record){.node = node, .parent = parent, .hash = hash, .block = (uint64_t)block,
                                        .older = above->child};
    memcpy(key_at(index, place), key, (size_t)index->key_size);
    enter(&index->lookup, tag_of(hash), place);
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
    __builtin_prefetch(entry_of(index, hash), 1);
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

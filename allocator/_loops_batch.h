/* `DecodeBatch`. Part of _loops.c. */

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
    else if (!PyErr_Occurred()) {
        int collects = PyGC_Disable(); /* views are open, and Python 3.11 may collect when a dict is made */
        bucket = PyDict_New();
        if (collects)
            PyGC_Enable();
        if (bucket != NULL && PyDict_SetItem(bucket, seq, Py_None) == 0)
            status = PyDict_SetItem(due, at, bucket);
        Py_XDECREF(bucket);
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
static int settle(PyObject *seq, Array *log, int64_t num_steps, int64_t log_steps)
{
    int64_t settled_at = GET(seq, _settled_at), row = GET(seq, _row), num_computed = GET(seq, _num_computed);
    int64_t behind = num_steps - settled_at, capacity = log->n / log_steps;
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
    int status = known ? next_hash(hash_block, key, &hash) : 0;
    Py_DECREF(key);
    return status == 1 && append_words(SLOT(seq, _hashes), &hash, 1) < 0 ? -1 : status;
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
static int prepare_rows(Batch *batch, PyObject *rows)
{
    Py_ssize_t n = PyList_GET_SIZE(rows);
    PyObject *done = call_with_int(batch->index, s_make_room, 2 * n); /* for blocks, and perhaps roots */
    int status = done == NULL ? -1 : 1;
    Array log = {0};
    Py_XDECREF(done);
    if (status < 0 || open_attribute(batch->batch, s__log, &log) < 0)
        return -1;
    for (Py_ssize_t i = 0; status >= 0 && i < n; i++, prefetch_row(rows, i))
        status = settle(PyList_GET_ITEM(rows, i), &log, batch->step - 1, batch->log_steps);
    close_array(&log);
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

/* The rows' part of a commit of `n` tokens that has happened; `merges` is a list. */
static int publish_rows(Batch *batch, PyObject *rows, const int32_t *sampled, Py_ssize_t n, int plain, PyObject *merges)
{
    int status = 1, open = 0;
    for (Py_ssize_t i = 0; status >= 0 && i < PyList_GET_SIZE(rows); i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        int64_t row = GET(seq, _row);
        status = 0;
        if (plain && row < n) {
            if (!open && open_press(batch->index, batch->pool, &batch->press) < 0)
                return -1;
            open = 1;
            status = publish_row(batch, seq, sampled[row]);
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
                     .size = PyLong_AsLongLong(args[5]), .step = get_int(args[0], s__num_steps) + 1,
                     .log_steps = get_int(args[0], s__log_steps)};
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
        if ((rows = rows_in_order(bucket)) == NULL || prepare_rows(&batch, rows) < 0)
            goto end;
    } else if (PyErr_Occurred())
        goto end;
    if ((merges = PyList_New(0)) == NULL || open_attribute(batch.batch, s__log, &log) < 0)
        goto failed;
    int64_t capacity = log.n / batch.log_steps;
    if (n <= capacity)
        memcpy(log.ints + (batch.step - 1) % batch.log_steps * capacity, sampled, (size_t)n * sizeof *sampled);
    close_array(&log);
    if (n > capacity) {
        Py_SETREF(merges, Py_NewRef(Py_None));
        goto end;
    }
    if (PyObject_SetAttr(batch.batch, s__num_steps, number) < 0)
        goto failed;
    if (rows != NULL &&
        (PyDict_DelItem(batch.due, number) < 0 || publish_rows(&batch, rows, sampled, n, plain, merges) < 0))
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

/* A sequence's `max_length`; -1 for one that is Python's, because it can be anything. */
static int64_t longest(PyObject *seq)
{
    PyObject *max_length = SLOT(seq, max_length);
    int overflow;
    if (max_length == Py_None)
        return INT64_MAX;
    return PyLong_CheckExact(max_length) ? PyLong_AsLongLongAndOverflow(max_length, &overflow) : -1;
}

/* Whether every row of a list can be given a block as it is: its table has room in `num_columns`, and it is not at its
 * `max_length`. */
static int can_serve(PyObject *rows, int64_t num_columns)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++, prefetch_row(rows, i)) {
        PyObject *seq = PyList_GET_ITEM(rows, i);
        if (longest(seq) <= GET(seq, _num_computed) || PyObject_Size(SLOT(seq, _table)) >= num_columns)
            return 0;
    }
    return 1;
}

/* `DecodeBatch._serve_row` without a window: 1 when it is done, 0 where it is Python's, -1 for an error. */
static int serve_row(Batch *batch, PyObject *seq, PyObject *block, Array *tables, int64_t num_columns)
{
    int64_t num_computed = GET(seq, _num_computed), end = GET(seq, _num_reserved) + batch->size;
    int64_t max_length = longest(seq), at = GET(seq, _row) * num_columns;
    PyObject *table = SLOT(seq, _table);
    Py_ssize_t entry = PyObject_Size(table);
    if (PyErr_Occurred())
        return -1;
    if (entry >= num_columns || at + entry >= tables->n || max_length < 0)
        return 0;
    PyObject *added = PyObject_CallMethodOneArg(table, s_append, block);
    if (added == NULL && PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Clear();
        return 0; /* Python makes another table */
    }
    if (added == NULL)
        return -1;
    Py_DECREF(added);
    tables->ints[at + entry] = (int32_t)PyLong_AsLong(block);
    end = end < max_length ? end : max_length;
    if (SET(seq, _num_reserved, end) < 0)
        return -1;
    return schedule(batch->due, seq, batch->step, num_computed, end, batch->size, batch->log_steps) < 0 ? -1 : 1;
}

/* One block for each row of a list. */
static int serve_rows(Batch *batch, PyObject *rows, PyObject *blocks, int64_t num_columns)
{
    int status = 1;
    Array tables = {0};
    for (Py_ssize_t i = 0; status >= 0 && i < PyList_GET_SIZE(rows); i++) {
        PyObject *seq = PyList_GET_ITEM(rows, i), *block = PyList_GET_ITEM(blocks, i);
        if (tables.ints == NULL && open_attribute(batch->batch, s__tables, &tables) < 0)
            return -1;
        status = serve_row(batch, seq, block, &tables, num_columns);
        if (status == 0) {
            close_array(&tables);
            PyObject *done = PyObject_CallMethodObjArgs(batch->batch, s__serve_row, seq, block, NULL);
            status = done == NULL ? -1 : 1;
            Py_XDECREF(done);
        }
    }
    close_array(&tables);
    return status;
}

/* `DecodeBatch.reserve` of rows that all get a block; None, and nothing has happened, where it is Python's. */
static PyObject *reserve_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Batch batch = {.batch = args[0], .pool = args[1], .size = PyLong_AsLongLong(args[2]),
                    .step = get_int(args[0], s__num_steps), .log_steps = get_int(args[0], s__log_steps)};
    int64_t num_columns = get_int(batch.batch, s__num_columns);
    PyObject *rows = NULL, *blocks = NULL, *number = NULL, *left = NULL;
    batch.due = PyObject_GetAttr(batch.batch, s__due);
    batch.starved = PyObject_GetAttr(batch.batch, s__starved);
    if (PyErr_Occurred() || (rows = rows_in_order(batch.starved)) == NULL)
        goto end;
    Py_ssize_t n = PyList_GET_SIZE(rows);
    number = PyObject_GetAttr(batch.pool, s_num_free);
    if (number == NULL)
        goto end;
    if (PyLong_AsSsize_t(number) < n || !can_serve(rows, num_columns)) {
        left = Py_NewRef(Py_None);
        goto end;
    }
    if ((blocks = call_with_int(batch.pool, s_take, n)) == NULL || serve_rows(&batch, rows, blocks, num_columns) < 0)
        goto end;
    PyDict_Clear(batch.starved);
    left = PyList_New(0);
end:
    Py_XDECREF(rows);
    Py_XDECREF(blocks);
    Py_XDECREF(number);
    Py_XDECREF(batch.due);
    Py_XDECREF(batch.starved);
    return left;
}

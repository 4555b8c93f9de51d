/* The allocator's loops over blocks, tokens and rows, compiled.
 *
 * Nothing is specified here. Each function stands for the Python loop that its comment names, works on the same lists,
 * dicts and arrays, and does as much of the loop's work as is plain: it stops, having changed nothing for it, before the
 * first item that is anything else (an error, a node with several blocks, an array that somebody reads), and says how
 * far it has come. Its caller goes on from there in Python. The steps of a batch stop for no row: for one that is not
 * plain they call the Python method that does it. So every error is raised by Python code, and each function here may
 * decline whatever would complicate it. An exception from here means that memory ran out, or that Python code which was
 * called has raised it.
 *
 * A view of an array's memory is never held while other code than ours could run: arrays can't grow under a view.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "keys are little-endian integers, and these loops take them from memory as they are: do without the loops"
#endif

#define PLACE_BITS 29 /* of a node's number */
#define MAX_NUMBER ((int64_t)(UINT64_MAX >> PLACE_BITS))

#define NAMES(X) \
    X(_cached) X(_content) X(_due) X(_empty) X(_free_places) X(_hashes) X(_key_size) X(_keys) \
    X(_last_number) X(_length) X(_links) X(_log) X(_log_steps) X(_lookup) X(_more_blocks) X(_more_key) X(_num_columns) \
    X(_num_computed) X(_num_reserved) X(_num_steps) X(_prepare_row) X(_publish_row) X(_published) X(_records) X(_refs) \
    X(_row) X(_rows) X(_serve_row) X(_settled_at) X(_starved) X(_table) X(_tables) X(_tokens) X(append) X(clock) \
    X(evictions) X(frombytes) X(make_room) X(max_length) X(media) X(num_free) X(num_reserved) X(published) \
    X(residency) X(take)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

#include "_loops_arrays.h"
#include "_loops_index.h"
#include "_loops_pool.h"
#include "_loops_prefix.h"
#include "_loops_batch.h"

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

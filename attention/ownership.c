/* Who names which block, taken from one step's block tables to the next: only what was added or has left is counted. */

#include <stdint.h>
#include <string.h>

/* Row r's blocks are blocks[indptr[r]] to blocks[indptr[r + 1]]. */
typedef struct {
    int64_t rows;
    const int64_t *indptr;
    const int32_t *blocks;
} Tables;

/* Whether a row names a block twice. `mark` is all 0 before and after. */
static int repeats(const int32_t *blocks, int64_t count, int32_t *mark) {
    int64_t seen = 0;
    while (seen < count && !mark[blocks[seen]]) mark[blocks[seen++]] = 1;
    for (int64_t i = 0; i < seen; i++) mark[blocks[i]] = 0;
    return seen < count;
}

/* Whether every row of `step` names a block once, and only it names the blocks it writes. The same holds of `last`.

   `computed` has the tokens of each row before the step; it writes the others. A row goes on from the one whose last
   block held the last of them: every row has written its last block, so no two of `last` end in the same one.
   `uses` counts for each block the entries of `last` that name it, and on return those of `step`; after a 0, it is
   worthless. `kept` is for a number per row of `step`, and `mark` for one per block, all 0 before and after. */
int kvproof_follow(const Tables *last, const Tables *step, const int64_t *computed, int64_t block_size, int32_t *uses,
                   int32_t *mark, int64_t *kept) {
    for (int64_t r = 0; r < last->rows; r++)
        if (last->indptr[r] < last->indptr[r + 1]) mark[last->blocks[last->indptr[r + 1] - 1]] = (int32_t)r + 1;

    for (int64_t r = 0; r < step->rows; r++) {
        const int32_t *blocks = step->blocks + step->indptr[r];
        kept[r] = 0;
        if (!computed[r]) continue;
        const int64_t count = (computed[r] - 1) / block_size + 1;
        const int64_t from = mark[blocks[count - 1]] - 1;
        if (from < 0) continue;
        const int64_t start = last->indptr[from];
        if (last->indptr[from + 1] != start + count) continue; /* or memory behind them might be read */
        if (memcmp(blocks, last->blocks + start, count * sizeof *blocks)) continue;
        kept[r] = count;
        mark[blocks[count - 1]] = 0; /* nobody else goes on from it */
    }

    for (int64_t r = 0; r < last->rows; r++) {
        const int64_t start = last->indptr[r], end = last->indptr[r + 1];
        if (start == end || !mark[last->blocks[end - 1]]) continue;
        mark[last->blocks[end - 1]] = 0;
        for (int64_t i = start; i < end; i++) uses[last->blocks[i]]--;
    }

    for (int64_t r = 0; r < step->rows; r++) {
        const int32_t *added = step->blocks + step->indptr[r] + kept[r];
        const int64_t count = step->blocks + step->indptr[r + 1] - added;
        int shared = 0;
        for (int64_t i = 0; i < count; i++) shared |= ++uses[added[i]] > 1;
        if (shared && repeats(added, count, mark)) return 0; /* what a row had and gains again, it writes: see below */
    }

    for (int64_t r = 0; r < step->rows; r++)
        for (int64_t i = step->indptr[r] + computed[r] / block_size; i < step->indptr[r + 1]; i++)
            if (uses[step->blocks[i]] != 1) return 0;
    return 1;
}

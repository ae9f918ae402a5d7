/* The index of a table whose rows belong to ids: it finds the row of an id, gives rows to new ids and releases rows.
 *
 * The index is a hash table with open addressing and linear probing. A slot has 8 bytes: the upper 32 bits of the id's hash
 * (its tag) and the row. The id itself is in the row's record, which a lookup reads anyway in order to update it. The upper
 * bits of the tag are the slot at which the search for the id begins, its home. So slots are in the order of their tags,
 * apart from collisions; a larger array of slots is written from front to back, and a slot can be moved without its id.
 *
 * Only the search for ids runs on several threads. What it writes does not depend on the order of the threads, and
 * everything else runs in the order of the batch, so that the result is the same for any number of threads.
 */
#include "hashing.h"
#include "structs.h"

#include <stdlib.h>
#include <string.h>

enum { GRAIN = 4096 };                  /* ids that a thread searches at least */
enum { GROUP = 32 };                    /* ids whose slots and rows are fetched into the cache together */
enum { IDS_AHEAD = 16 };                /* slots are fetched into the cache this many ids before they are used */
enum { SKETCH_DEPTH = 4 };              /* counters of an id */
static const uint32_t MAX_FREQUENCY = 0x7fffffff;

static uint64_t home_of(const id_index *x, uint64_t tag) { return tag >> (32 - x->bits); }
static uint64_t last_slot(const id_index *x) { return ((uint64_t)1 << x->bits) - 1; }
static uint64_t tag_of(uint64_t id) { return mix_splitmix64(id) >> 32; }

/* Return the first slot from `at` on that has this tag or is empty. */
static uint64_t probe(const id_index *x, uint64_t tag, uint64_t at)
{
    while (x->slots[at] && x->slots[at] >> 32 != tag)
        at = (at + 1) & last_slot(x);
    return at;
}

/* Return the slot of an id, or the empty slot where the search for it ends. The search begins at `at`. */
static uint64_t find_slot(const id_index *x, uint64_t id, uint64_t tag, uint64_t at)
{
    at = probe(x, tag, at);
    while (x->slots[at] && x->rows[(uint32_t)x->slots[at]].id != id)
        at = probe(x, tag, (at + 1) & last_slot(x));
    return at;
}

/* Lookup ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const id_index *index;
    const uint64_t *ids;
    int64_t *rows;
    int64_t is_training;
    int64_t misses;
} id_search;

/* Record that a row is used. */
static void use_row(const id_index *x, table_row *row)
{
    row->last_seen = x->time;
    row->used_in = (uint32_t)x->step;
    row->frequency += row->frequency < MAX_FREQUENCY;
}

/* Record that a row is used. Threads may do so for the same row: they write the same time and step. A count above
 * MAX_FREQUENCY is taken back, and once there is one, the count stays at MAX_FREQUENCY. */
static void use_row_in_threads(const id_index *x, table_row *row)
{
    __atomic_store_n(&row->last_seen, x->time, __ATOMIC_RELAXED);
    __atomic_store_n(&row->used_in, (uint32_t)x->step, __ATOMIC_RELAXED);
    if (__atomic_fetch_add(&row->frequency, 1, __ATOMIC_RELAXED) >= MAX_FREQUENCY)
        __atomic_fetch_sub(&row->frequency, 1, __ATOMIC_RELAXED);
}

/* Search for some ids. A memory access takes longer than everything else, so the slots of a group of ids are fetched
 * together, and then the rows. */
static void find_range(int64_t begin, int64_t end, void *context)
{
    id_search *search = context;
    const id_index *x = search->index;
    uint64_t tags[GROUP], at[GROUP];
    int64_t misses = 0;
    for (int64_t first = begin; first < end; first += GROUP) {
        const int64_t n = end - first < GROUP ? end - first : GROUP;
        const uint64_t *ids = search->ids + first;
        for (int64_t i = 0; i < n; i++) {
            tags[i] = tag_of(ids[i]);
            at[i] = home_of(x, tags[i]);
            __builtin_prefetch(&x->slots[at[i]]);
        }
        for (int64_t i = 0; i < n; i++) {
            at[i] = probe(x, tags[i], at[i]);
            __builtin_prefetch(&x->rows[(uint32_t)x->slots[at[i]]], 1);
        }
        for (int64_t i = 0; i < n; i++) {
            const uint32_t row = (uint32_t)x->slots[find_slot(x, ids[i], tags[i], at[i])];
            misses += !row;
            search->rows[first + i] = row || !search->is_training ? (int64_t)row : -1;
            if (row && search->is_training)
                use_row_in_threads(x, &x->rows[row]);
        }
    }
    __atomic_fetch_add(&search->misses, misses, __ATOMIC_RELAXED);
}

/* Write the rows of n ids. Returns the number of ids without a row. For these the row is -1 when training, else 0. Training
 * also records that the rows are used. */
EXPORT int64_t cadam_index_find(const id_index *x, const uint64_t *ids, int64_t n, int64_t *rows, int64_t is_training,
                                parallel_for_fn *parallel_for)
{
    id_search search = {x, ids, rows, is_training, 0};
    if (n > GRAIN)
        parallel_for(0, n, GRAIN, find_range, &search);
    else
        find_range(0, n, &search);
    return search.misses;
}

/* New ids ----------------------------------------------------------------------------------------------------- */

static void halve_counters(id_sketch *s)
{
    const int64_t size = (int64_t)SKETCH_DEPTH << s->bits;
    for (int64_t i = 0; i < size; i++)
        s->counters[i] >>= 1;
    s->added = 0;
}

/* Write the addresses of the counters of an id, and fetch them into the cache. */
static void find_counters(const id_sketch *s, uint64_t id, uint16_t *counters[SKETCH_DEPTH])
{
    uint64_t hash = mix_splitmix64(id);
    for (int d = 0; d < SKETCH_DEPTH; d++) {
        hash = mix_splitmix64(hash + 0x9e3779b97f4a7c15);
        counters[d] = s->counters + ((int64_t)d << s->bits) + (hash >> (64 - s->bits));
        __builtin_prefetch(counters[d], 1);
    }
}

/* Add sightings of an id with these counters. Returns how often it was seen, or more. Only those of its counters are
 * increased that would be too small otherwise ("conservative update"). */
static int64_t count_sightings(id_sketch *s, uint16_t *const counters[SKETCH_DEPTH], int64_t times)
{
    int64_t least = UINT16_MAX;
    for (int d = 0; d < SKETCH_DEPTH; d++)
        least = *counters[d] < least ? *counters[d] : least;
    const int64_t seen = least + times < UINT16_MAX ? least + times : UINT16_MAX;
    for (int d = 0; d < SKETCH_DEPTH; d++)
        if (*counters[d] < seen)
            *counters[d] = (uint16_t)seen;
    s->added += times;
    if (s->added >= s->window)
        halve_counters(s);
    return seen;
}

/* Collect the distinct ids of a batch that have no row, and decide which of them get one. Without a sketch, all of them do.
 * Writes new_ids, new_counts and new_count. The row of each occurrence becomes -1 - its number among the new ids, or 0.
 * Returns 0, or -2 if memory ran out; then nothing was changed. */
static int64_t admit(id_sketch *sketch, id_batch *b)
{
    int64_t bits = 4;
    while (((int64_t)1 << bits) < 2 * b->misses)
        bits++;
    const uint64_t last = ((uint64_t)1 << bits) - 1;
    uint32_t *numbers = calloc((size_t)last + 1, sizeof *numbers); /* 1 + the number of a distinct id, by hash */
    int64_t *new_number = malloc((size_t)b->misses * sizeof *new_number); /* by number of a distinct id */
    if (!numbers || !new_number) {
        free(numbers);
        free(new_number);
        return -2;
    }
    int64_t distinct = 0;
    for (int64_t i = 0; i < b->n; i++) {
        if (b->rows[i] >= 0)
            continue;
        const uint64_t id = b->ids[i];
        uint64_t at = mix_splitmix64(id) & last;
        while (numbers[at] && b->new_ids[numbers[at] - 1] != id)
            at = (at + 1) & last;
        if (!numbers[at]) {
            b->new_ids[distinct] = id;
            b->new_counts[distinct] = 0;
            numbers[at] = (uint32_t)++distinct;
        }
        b->new_counts[numbers[at] - 1]++;
        b->rows[i] = -(int64_t)numbers[at];
    }
    uint16_t *counters[IDS_AHEAD][SKETCH_DEPTH]; /* the counters of this and the next ids */
    for (int64_t d = 0; sketch && d < distinct && d < IDS_AHEAD; d++)
        find_counters(sketch, b->new_ids[d], counters[d]);
    b->new_count = 0;
    for (int64_t d = 0; d < distinct; d++) {
        const uint64_t id = b->new_ids[d];
        const int64_t times = b->new_counts[d], seen = sketch ? count_sightings(sketch, counters[d % IDS_AHEAD], times) : 0;
        if (sketch && d + IDS_AHEAD < distinct)
            find_counters(sketch, b->new_ids[d + IDS_AHEAD], counters[d % IDS_AHEAD]);
        new_number[d] = -1;
        if (!sketch || seen >= sketch->threshold) {
            new_number[d] = b->new_count++;
            b->new_ids[new_number[d]] = id;
            b->new_counts[new_number[d]] = times;
        }
    }
    for (int64_t i = 0; i < b->n; i++)
        if (b->rows[i] < 0)
            b->rows[i] = -1 - new_number[-1 - b->rows[i]];
    free(numbers);
    free(new_number);
    return 0;
}

/* Give rows to the new ids of a batch: free ones first, then unused ones below `row_limit`. The index must have empty slots
 * for all new ids. Writes the rows of all occurrences and the number of those that have row 0. */
EXPORT void cadam_index_assign(id_index *x, id_batch *b, int64_t row_limit)
{
    for (int64_t j = 0; j < b->new_count; j++) {
        if (j + IDS_AHEAD < b->new_count)
            __builtin_prefetch(&x->slots[home_of(x, tag_of(b->new_ids[j + IDS_AHEAD]))], 1);
        int64_t row = x->first_free;
        if (row) {
            x->first_free = (int64_t)x->rows[row].id;
            x->free_count--;
        } else if (x->row_count < row_limit) {
            row = x->row_count++;
        }
        b->new_rows[j] = row;
        if (!row)
            continue;
        const uint64_t id = b->new_ids[j], tag = tag_of(id);
        const uint32_t frequency = b->new_counts[j] < MAX_FREQUENCY ? (uint32_t)b->new_counts[j] : MAX_FREQUENCY;
        x->slots[find_slot(x, id, tag, home_of(x, tag))] = tag << 32 | (uint64_t)row;
        x->rows[row] = (table_row){id, x->time, frequency, (uint32_t)x->step};
    }
    b->refused = 0;
    for (int64_t i = 0; i < b->n; i++) {
        if (b->rows[i] < 0)
            b->rows[i] = b->new_rows[-1 - b->rows[i]];
        b->refused += b->rows[i] == 0;
    }
}

/* Decide which ids of a batch get rows, and give rows to them if there is room: below `row_limit`, in `record_count` records
 * and in the slots. Returns 0 when done, 1 if there is no room for the new ids, which cadam_index_assign then handles, or -2
 * if memory ran out; then nothing was changed. */
EXPORT int64_t cadam_index_train(id_index *x, id_sketch *sketch, id_batch *b, int64_t row_limit, int64_t record_count)
{
    const int64_t failed = admit(sketch, b);
    if (failed)
        return failed;
    const int64_t unused = b->new_count - x->free_count, rows = x->row_count + (unused > 0 ? unused : 0);
    const int64_t ids = x->row_count - 1 - x->free_count + b->new_count;
    if (rows > row_limit || rows > record_count || 4 * ids > (int64_t)3 << x->bits)
        return 1;
    cadam_index_assign(x, b, row_limit);
    return 0;
}

/* Several features -------------------------------------------------------------------------------------------- */

static const int64_t MISSING_ROW = INT64_MAX; /* the row of a missing id while rows are those of the index */

static int is_missing(const id_feature *f, int64_t i)
{
    return f->has_missing && (int64_t)f->batch.ids[i] == f->missing_id;
}

/* Write the rows of the ids of several features, which is row 1 for ids without one. Nothing else is changed. */
EXPORT void cadam_features_find(const id_feature *features, int64_t count, parallel_for_fn *parallel_for)
{
    for (const id_feature *f = features; f < features + count; f++) {
        const id_batch *b = &f->batch;
        cadam_index_find(f->index, b->ids, b->n, b->rows, 0, parallel_for);
        for (int64_t i = 0; i < b->n; i++)
            b->rows[i] = is_missing(f, i) ? 0 : b->rows[i] + 1;
    }
}

/* Record that the rows which cadam_features_find has found are used, and count the ids without one. The rows become those of
 * the index, -1 for ids without a row. */
static void use_rows(id_feature *f)
{
    id_batch *b = &f->batch;
    const id_index *x = f->index;
    b->misses = 0;
    for (int64_t i = 0; i < b->n; i++) {
        const int64_t ahead = b->rows[i + IDS_AHEAD < b->n ? i + IDS_AHEAD : b->n - 1];
        __builtin_prefetch(&x->rows[ahead > 0 ? ahead - 1 : 0], 1);
        const int64_t row = b->rows[i] - 1;
        if (row > 0)
            use_row(x, &x->rows[row]);
        b->misses += row == 0;
        b->rows[i] = row > 0 ? row : row == 0 ? -1 : MISSING_ROW;
    }
}

/* Set the rows of new ids: in tables to the values of the row that ids without a row share, and in the state of the
 * optimizer, if another id had the row before, to the state of a row that was never updated. */
static void start_rows(const id_feature *f, const row_memory *memory)
{
    char *first = memory->data + f->start * memory->bytes;
    const char *value = memory->value ? memory->value : first;
    const int64_t end = memory->value ? f->first_unused : INT64_MAX;
    for (int64_t j = 0; j < f->batch.new_count; j++) {
        const int64_t row = f->batch.new_rows[j];
        if (row && row < end)
            memcpy(first + row * memory->bytes, value, (size_t)memory->bytes);
    }
}

/* Start the rows of new ids, and turn the rows of a batch into those of its feature. */
static void finish_feature(id_feature *f, const row_memory *memories, int64_t memory_count)
{
    const id_batch *b = &f->batch;
    f->admitted = 0;
    for (int64_t j = 0; j < b->new_count; j++)
        f->admitted += b->new_rows[j] != 0;
    for (int64_t m = 0; m < memory_count; m++)
        start_rows(f, &memories[m]);
    for (int64_t i = 0; i < b->n; i++)
        b->rows[i] = b->rows[i] == MISSING_ROW ? 0 : b->rows[i] + 1;
    if (!f->table_rows)
        return;
    const int64_t *rows = b->rows;
    for (int64_t *to = f->table_rows; rows < b->rows + b->n; to += f->stride)
        for (int64_t e = 0; e < f->length; e++)
            to[e] = f->start - 1 + *rows++;
}

/* Give rows to those new ids of several features that get one, after cadam_features_find. The optimizer has taken the step
 * that needed the rows of the batch before. Returns the number of features without room for their new ids, for which
 * cadam_feature_assign must be called, or -2 if memory ran out. */
EXPORT int64_t cadam_features_train(id_feature *features, int64_t count, const row_memory *memories, int64_t memory_count)
{
    int64_t full = 0;
    for (id_feature *f = features; f < features + count; f++) {
        f->index->step++;
        f->first_unused = f->index->row_count;
        f->batch.new_count = f->batch.refused = f->is_full = 0;
        use_rows(f);
        if (f->batch.misses)
            f->is_full = cadam_index_train(f->index, f->sketch, &f->batch, f->row_limit, f->record_count);
        if (f->is_full < 0)
            return f->is_full;
        full += f->is_full;
        if (!f->is_full)
            finish_feature(f, memories, memory_count);
    }
    return full;
}

/* Give rows to the new ids of a feature for which there was no room before. */
EXPORT void cadam_feature_assign(id_feature *f, const row_memory *memories, int64_t memory_count)
{
    cadam_index_assign(f->index, &f->batch, f->row_limit);
    finish_feature(f, memories, memory_count);
}

/* Released rows ----------------------------------------------------------------------------------------------- */

/* Remove the id of a row from the index and add the row to the free ones. The slots that follow are moved forward, so that
 * no search ends too early. */
static void release_row(id_index *x, int64_t row)
{
    const uint64_t id = x->rows[row].id, tag = tag_of(id), last = last_slot(x);
    uint64_t empty = find_slot(x, id, tag, home_of(x, tag));
    for (uint64_t at = (empty + 1) & last; x->slots[at]; at = (at + 1) & last) {
        const uint64_t distance = (at - home_of(x, x->slots[at] >> 32)) & last;
        if (distance >= ((at - empty) & last)) {
            x->slots[empty] = x->slots[at];
            empty = at;
        }
    }
    x->slots[empty] = 0;
    x->rows[row] = (table_row){.id = (uint64_t)x->first_free};
    x->first_free = row;
    x->free_count++;
}

/* Whether a row belongs to an id and is not needed by the optimizer step that follows. */
static int is_releasable(const id_index *x, int64_t row)
{
    return x->rows[row].frequency && x->rows[row].used_in != (uint32_t)x->step;
}

/* Release the rows whose ids were last seen before `cutoff`. Returns their number. */
EXPORT int64_t cadam_index_expire(id_index *x, int64_t cutoff)
{
    int64_t count = 0;
    for (int64_t row = 1; row < x->row_count; row++)
        if (x->rows[row].last_seen < cutoff && is_releasable(x, row)) {
            release_row(x, row);
            count++;
        }
    return count;
}

/* A row that may be evicted. Of two rows, the one with the smaller `first` is evicted first; if these are equal, the one
 * with the smaller `second`, and if these are equal too, the one with the smaller number. */
typedef struct {
    int64_t first, second, row;
} candidate;

static int precedes(const candidate *a, const candidate *b)
{
    if (a->first != b->first)
        return a->first < b->first;
    return a->second != b->second ? a->second < b->second : a->row < b->row;
}

/* Move the candidate at `at` of a heap down to its place; the last one to be evicted is at the top. */
static void sift_down(candidate *heap, int64_t size, int64_t at)
{
    const candidate moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && precedes(&heap[child], &heap[child + 1]))
            child++;
        if (!precedes(&moved, &heap[child]))
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static candidate candidate_of(const id_index *x, int64_t row, int64_t by_frequency)
{
    const int64_t age[2] = {x->rows[row].last_seen, x->rows[row].frequency};
    return (candidate){age[by_frequency], age[!by_frequency], row};
}

/* Release `count` rows: those that were seen least recently or, if `by_frequency`, least often. Rows that are equal in this
 * respect are ordered by the other one. Returns the number of released rows, which is smaller than `count` if the optimizer
 * step that follows needs too many, or -2 if memory ran out.
 *
 * A histogram of `first` shows up to which bin all rows are released. A heap chooses among the rows of the bin after it. */
EXPORT int64_t cadam_index_evict(id_index *x, int64_t count, int64_t by_frequency)
{
    enum { BINS = 4096 };
    int64_t bins[BINS] = {0}, lowest = INT64_MAX, highest = INT64_MIN, released = 0, size = 0;
    for (int64_t row = 1; row < x->row_count; row++)
        if (is_releasable(x, row)) {
            const int64_t first = candidate_of(x, row, by_frequency).first;
            lowest = first < lowest ? first : lowest;
            highest = first > highest ? first : highest;
        }
    if (count <= 0 || lowest > highest)
        return 0;
    const uint64_t width = ((uint64_t)highest - (uint64_t)lowest) / BINS + 1;
    for (int64_t row = 1; row < x->row_count; row++)
        if (is_releasable(x, row))
            bins[((uint64_t)candidate_of(x, row, by_frequency).first - (uint64_t)lowest) / width]++;
    uint64_t last = 0;
    int64_t left = count;
    while (last < BINS - 1 && bins[last] <= left)
        left -= bins[last++];
    left = left < bins[last] ? left : bins[last];
    candidate *heap = malloc((size_t)(left > 0 ? left : 1) * sizeof *heap);
    if (!heap)
        return -2;
    for (int64_t row = 1; row < x->row_count; row++) {
        if (!is_releasable(x, row))
            continue;
        const candidate c = candidate_of(x, row, by_frequency);
        const uint64_t bin = ((uint64_t)c.first - (uint64_t)lowest) / width;
        if (bin < last) {
            release_row(x, row);
            released++;
        } else if (bin == last && size < left) {
            heap[size++] = c;
            if (size == left)
                for (int64_t at = size / 2; at--;)
                    sift_down(heap, size, at);
        } else if (bin == last && left && precedes(&c, heap)) {
            heap[0] = c;
            sift_down(heap, size, 0);
        }
    }
    for (int64_t i = 0; i < size; i++)
        release_row(x, heap[i].row);
    free(heap);
    return released + size;
}

/* Slots ------------------------------------------------------------------------------------------------------- */

/* Write the occupied ones of 2^from_bits slots to 2^to_bits slots, which must be empty. */
EXPORT void cadam_index_rehash(const uint64_t *from, int64_t from_bits, uint64_t *to, int64_t to_bits)
{
    const id_index x = {.slots = to, .bits = to_bits};
    for (int64_t i = 0; i < (int64_t)1 << from_bits; i++) {
        if (!from[i])
            continue;
        uint64_t at = home_of(&x, from[i] >> 32);
        while (to[at])
            at = (at + 1) & last_slot(&x);
        to[at] = from[i];
    }
}

/* Fill the slots, which must be empty, from the records of the rows. Returns -1, or a row at which the records contradict
 * each other: two rows have the same id, or the list of free rows does not consist of all free rows. */
EXPORT int64_t cadam_index_build(id_index *x)
{
    int64_t free_rows = 0, row = x->first_free;
    for (int64_t i = 0; i < x->free_count; i++) {
        if (row <= 0 || row >= x->row_count || x->rows[row].frequency)
            return row;
        row = (int64_t)x->rows[row].id;
    }
    if (row)
        return row;
    for (row = 1; row < x->row_count; row++) {
        if (!x->rows[row].frequency) {
            free_rows++;
            continue;
        }
        const uint64_t id = x->rows[row].id, tag = tag_of(id), at = find_slot(x, id, tag, home_of(x, tag));
        if (x->slots[at])
            return row;
        x->slots[at] = tag << 32 | (uint64_t)row;
    }
    return free_rows == x->free_count ? -1 : 0;
}

/* Ids and values ---------------------------------------------------------------------------------------------- */

/* Write the 64-bit hashes of n texts, which lie one after the other and end at `ends`. */
EXPORT void cadam_hash_texts(const uint8_t *data, const int64_t *ends, int64_t n, uint64_t *hashes)
{
    for (int64_t i = 0, begin = 0; i < n; begin = ends[i++])
        hashes[i] = mix_splitmix64(fnv1a(data + begin, ends[i] - begin));
}

typedef struct {
    const uint64_t *ids;
    int64_t width;
    uint64_t seed;
    double unit;
    float *out;
} initial_values;

static void initialize_range(int64_t begin, int64_t end, void *context)
{
    const initial_values *v = context;
    for (int64_t i = begin; i < end; i++) {
        uint64_t state = mix_splitmix64(v->ids[i] ^ mix_splitmix64(v->seed));
        for (int64_t column = 0; column < v->width; column++) {
            const uint64_t bits = mix_splitmix64(state += 0x9e3779b97f4a7c15);
            const int64_t sum = (int64_t)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
            v->out[i * v->width + column] = (float)((double)(sum - 2 * 0xffff) * v->unit);
        }
    }
}

/* Write the initial values of the rows of n ids. They depend on the seed and the id alone. Each is the sum of four numbers
 * that are uniformly distributed, so that it is almost normally distributed and every processor computes the same bits. */
EXPORT void cadam_initial_rows(const uint64_t *ids, int64_t n, int64_t width, int64_t seed, double std, float *out,
                               parallel_for_fn *parallel_for)
{
    enum { ROWS = 1024 };
    const double std_of_sum = 37837.22723720648; /* sqrt(4 * (65536^2 - 1) / 12) */
    initial_values values = {ids, width, (uint64_t)seed, std / std_of_sum, out};
    if (n > ROWS)
        parallel_for(0, n, ROWS, initialize_range, &values);
    else
        initialize_range(0, n, &values);
}

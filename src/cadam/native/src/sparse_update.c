/* A step over the rows of embedding tables that their sparse gradients name, in one call for all tables with the same ids.
 *
 * The step goes from raw ids and gradient rows to the updated tables without a sort:
 *   1. The ids are distributed over buckets of neighboring rows.
 *   2. Within a bucket, a small lookup table finds repeated ids, and the positions of each row's gradients are collected.
 *   3. The gradients of each row are summed in order of appearance, and the row is updated, table by table.
 * Every phase keeps the order of appearance, so the result depends neither on the sizes of chunks and buckets nor on the
 * number of threads.
 */
#include "structs.h"

#include <stdlib.h>

typedef struct {
    const int64_t *ids;
    int64_t last_row;
    int has_invalid;
} id_check;

/* Set has_invalid if an id is out of range. For an id that is negative the sign bit of the id is set, and for one that is
 * too large the sign bit of last_row - id, so that the loop needs no branch. */
static void check_range(int64_t begin, int64_t end, void *context)
{
    id_check *check = context;
    uint64_t signs = 0;
    for (int64_t i = begin; i < end; i++)
        signs |= (uint64_t)check->ids[i] | ((uint64_t)check->last_row - (uint64_t)check->ids[i]);
    if (signs >> 63)
        __atomic_store_n(&check->has_invalid, 1, __ATOMIC_RELAXED);
}

/* Return the position of the first of n ids that is out of range, or -1. */
EXPORT int64_t cadam_check_ids(const int64_t *ids, int64_t n, int64_t rows, parallel_for_fn *parallel_for)
{
    enum { GRAIN = 32768 };
    id_check check = {ids, rows - 1, 0};
    if (n > GRAIN)
        parallel_for(0, n, GRAIN, check_range, &check);
    else
        check_range(0, n, &check);
    for (int64_t i = 0; check.has_invalid && i < n; i++)
        if ((uint64_t)ids[i] >= (uint64_t)rows)
            return i;
    return -1;
}

/* The memory in which a thread collects the distinct rows of a bucket. */
typedef struct {
    uint32_t *number_of; /* by row: its number among the distinct rows plus one, or 0 if it has not appeared */
    uint32_t *distinct;  /* by number: the row */
    uint32_t *ends;      /* by number: how often the row appears, then where its positions begin, then where they end */
    uint32_t *positions; /* positions of the gradients, by row and then in order of appearance */
} distinct_rows;

/* One of the tables of a step. */
typedef struct {
    const sparse_table *table;
    const char *grads;
    uint32_t noise_key;
    const coefficients *c;
    int64_t aligned, touched; /* elements counted by an update */
    double *squares;          /* by bucket, written by the norm */
} table_step;

typedef struct sparse_step sparse_step;

struct sparse_step {
    void (*process_rows)(const sparse_step *step, table_step *t, int64_t bucket, row_batch *rows);
    const instruction_set *set;
    table_step *tables;
    int64_t count;      /* number of tables, which have the same number of rows */
    const int64_t *ids;
    int64_t n;          /* number of ids */
    int64_t shift;      /* a bucket has 2^shift rows */
    int64_t buckets, chunks;
    uint32_t *offsets;  /* [chunks][buckets]: number of ids, then where the chunk's part of the bucket begins */
    uint32_t *starts;   /* [buckets + 1]: where each bucket begins */
    sparse_entry *entries; /* by bucket, then in order of appearance */
    distinct_rows *distinct; /* by thread */
    int64_t invalid;    /* position of an id that is out of range, or -1 */
    int64_t next;       /* the next bucket to be processed */
};

static int64_t chunk_begin(const sparse_step *step, int64_t chunk) { return step->n * chunk / step->chunks; }

/* Count the ids of each bucket in some chunks. */
static void count_range(int64_t begin, int64_t end, void *context)
{
    sparse_step *step = context;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        uint32_t *offsets = step->offsets + chunk * step->buckets;
        for (int64_t i = chunk_begin(step, chunk), last = chunk_begin(step, chunk + 1); i < last; i++) {
            const int64_t id = step->ids[i];
            if ((uint64_t)id >= (uint64_t)step->tables->table->rows) {
                int64_t none = -1; /* the message needs only one of the invalid positions */
                __atomic_compare_exchange_n(&step->invalid, &none, i, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
                return;
            }
            offsets[id >> step->shift]++;
        }
    }
}

/* Entries are written to many buckets in turn, so the cache line of a coming write is fetched in advance. */
enum { ENTRIES_AHEAD = 16 };

/* Write the ids of some chunks into their buckets. */
static void distribute_range(int64_t begin, int64_t end, void *context)
{
    sparse_step *step = context;
    const int64_t mask = ((int64_t)1 << step->shift) - 1;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        uint32_t *offsets = step->offsets + chunk * step->buckets;
        for (int64_t i = chunk_begin(step, chunk), last = chunk_begin(step, chunk + 1); i < last; i++) {
            const int64_t id = step->ids[i];
            sparse_entry *to = &step->entries[offsets[id >> step->shift]++];
            __builtin_prefetch(to + ENTRIES_AHEAD, 1);
            *to = (sparse_entry){(uint32_t)(id & mask), (uint32_t)i};
        }
    }
}

/* Find the distinct rows of n entries and collect the positions of each row's gradients. Returns the number of distinct
 * rows. The processor cannot predict whether a row is new, so the first loop has no branch that depends on it. */
static int64_t collect_rows(sparse_entry *entries, int64_t n, distinct_rows *rows)
{
    uint32_t *number_of = rows->number_of, *distinct = rows->distinct, *ends = rows->ends;
    uint32_t count = 0, total = 0;
    ends[0] = 0;
    for (int64_t e = 0; e < n; e++) {
        const uint32_t row = entries[e].row, seen = number_of[row], is_new = seen == 0;
        distinct[count] = row;
        count += is_new;
        ends[count] = 0;
        const uint32_t number = seen + (count & -is_new);
        number_of[row] = number;
        entries[e].row = number - 1;
        ends[number - 1]++;
    }
    for (uint32_t d = 0; d < count; d++) {
        const uint32_t times = ends[d];
        ends[d] = total;
        total += times;
        number_of[distinct[d]] = 0;
    }
    for (int64_t e = 0; e < n; e++)
        rows->positions[ends[entries[e].row]++] = entries[e].position;
    return count;
}

/* Write the sum of the squares of a bucket. */
static void square_rows(const sparse_step *step, table_step *t, int64_t bucket, row_batch *rows)
{
    t->squares[bucket] = step->set->squared_norm[t->table->dtype](rows);
}

enum { GATHERED_ROWS = 256 }; /* rows of one element that are gathered for one call of a dense kernel */

/* Update rows of one element each: gather them, update them as a dense tensor in vectors, and write them back. Returns the
 * number of aligned elements. */
#define UPDATE_SINGLE_ELEMENTS(real)                                                                                   \
    static int64_t update_single_elements_##real(const kernel *k, const row_batch *rows, const void *c)                \
    {                                                                                                                  \
        const real *grads = rows->grads;                                                                               \
        real *p = rows->p, values[GATHERED_ROWS], sums[GATHERED_ROWS], state[MAX_BUFFERS][GATHERED_ROWS];              \
        void *const s[MAX_BUFFERS] = {state[0], state[1], state[2], state[3]};                                         \
        int64_t aligned = 0, begin = 0;                                                                                \
        for (int64_t first = 0; first < rows->count; first += GATHERED_ROWS) {                                         \
            const uint32_t *distinct = rows->distinct + first;                                                         \
            const int64_t left = rows->count - first, n = left < GATHERED_ROWS ? left : GATHERED_ROWS;                 \
            for (int64_t r = 0; r < n; r++) {                                                                          \
                const int64_t end = rows->ends[first + r];                                                             \
                real sum = grads[rows->positions[begin]];                                                              \
                for (int64_t e = begin + 1; e < end; e++)                                                              \
                    sum += grads[rows->positions[e]];                                                                  \
                sums[r] = sum;                                                                                         \
                begin = end;                                                                                           \
            }                                                                                                          \
            for (int64_t r = 0; r < n; r++)                                                                            \
                values[r] = p[distinct[r]];                                                                            \
            for (int b = 0; b < k->buffers; b++)                                                                       \
                for (int64_t r = 0; r < n; r++)                                                                        \
                    state[b][r] = ((const real *)rows->s[b])[distinct[r]];                                             \
            aligned += k->dense[rows->dtype](values, sums, s, n, c);                                                   \
            for (int64_t r = 0; r < n; r++)                                                                            \
                p[distinct[r]] = values[r];                                                                            \
            for (int b = 0; b < k->buffers; b++)                                                                       \
                for (int64_t r = 0; r < n; r++)                                                                        \
                    ((real *)rows->s[b])[distinct[r]] = state[b][r];                                                   \
        }                                                                                                              \
        return aligned;                                                                                                \
    }
UPDATE_SINGLE_ELEMENTS(float)
UPDATE_SINGLE_ELEMENTS(double)

/* Return the kernel for rows of a table, or 0 if they have one element each and are updated as a dense tensor. */
static update_rows_fn *find_row_kernel(const kernel *k, const sparse_table *t)
{
    if (t->row_moments)
        return k->row_moment_sparse[t->moments];
    if (t->moments)
        return k->quantized_sparse[t->moments];
    if (t->width == 1 && !t->row_steps && t->grad_dtype == t->dtype && t->dtype <= F64)
        return 0;
    return t->grad_dtype == t->dtype ? k->sparse[t->dtype] : k->sparse_float_grads[t->dtype];
}

static void update_rows(const sparse_step *step, table_step *work, int64_t bucket, row_batch *rows)
{
    const sparse_table *t = work->table;
    const kernel *k = &step->set->kernels[t->kernel];
    const int64_t row = bucket << step->shift;
    rows->p = (char *)t->param + row * t->width * param_size(t->dtype);
    for (int b = 0; b < k->buffers; b++) {
        const int has_row_moments = t->row_moments >> b & 1;
        const int64_t row_bytes = has_row_moments ? (int64_t)sizeof(float) : t->width * state_size(t->dtype, t->moments);
        rows->s[b] = (char *)t->state[b] + row * row_bytes;
    }
    for (int b = 0; b < MAX_QUANTIZED; b++)
        rows->scales[b] = t->scales[b] ? (uint8_t *)t->scales[b] + row : 0;
    rows->first_position = (uint64_t)(row * t->width);
    rows->noise_key = work->noise_key;
    rows->steps = t->row_steps ? (int32_t *)t->row_steps + row : 0;
    rows->set_of = (const int32_t *)t->set_of;
    rows->last_count = (int32_t)t->last_count;
    rows->set_size = sizeof(coefficients);
    rows->aging = (const void *)t->aging;
    rows->max_missed = (int32_t)t->max_missed;
    rows->now = (int32_t)next_step(*(const float *)t->step);
    update_rows_fn *update = find_row_kernel(k, t);
    const void *c = coefficients_for(work->c, t->dtype);
    int64_t aligned;
    if (update)
        aligned = update(rows, c);
    else if (t->dtype == F64)
        aligned = update_single_elements_double(k, rows, c);
    else
        aligned = update_single_elements_float(k, rows, c);
    __atomic_fetch_add(&work->aligned, aligned, __ATOMIC_RELAXED);
    __atomic_fetch_add(&work->touched, rows->count * t->width, __ATOMIC_RELAXED);
}

static void process_bucket(const sparse_step *step, int64_t bucket, distinct_rows *distinct)
{
    const int64_t first = step->starts[bucket], n = step->starts[bucket + 1] - first;
    const int64_t count = collect_rows(step->entries + first, n, distinct);
    for (int64_t i = 0; i < step->count; i++) {
        table_step *t = &step->tables[i];
        row_batch rows = {.count = count, .width = t->table->width, .dtype = t->table->dtype,
                          .grad_dtype = t->table->grad_dtype, .distinct = distinct->distinct, .ends = distinct->ends,
                          .positions = distinct->positions, .grads = t->grads};
        step->process_rows(step, t, bucket, &rows);
    }
}

/* Process buckets until none is left. */
static void bucket_range(int64_t begin, int64_t end, void *context)
{
    sparse_step *step = context;
    for (int64_t thread = begin; thread < end; thread++)
        for (;;) {
            const int64_t bucket = __atomic_fetch_add(&step->next, 1, __ATOMIC_RELAXED);
            if (bucket >= step->buckets)
                break;
            if (step->starts[bucket] < step->starts[bucket + 1])
                process_bucket(step, bucket, &step->distinct[thread]);
        }
}

/* Turn the counts of each chunk into the offsets where its parts of the buckets begin. Returns the size of the largest
 * bucket. */
static int64_t compute_offsets(sparse_step *step)
{
    uint32_t total = 0, largest = 0;
    for (int64_t b = 0; b < step->buckets; b++) {
        step->starts[b] = total;
        for (int64_t chunk = 0; chunk < step->chunks; chunk++) {
            uint32_t *offset = &step->offsets[chunk * step->buckets + b];
            const uint32_t count = *offset;
            *offset = total;
            total += count;
        }
        if (total - step->starts[b] > largest)
            largest = total - step->starts[b];
    }
    step->starts[step->buckets] = total;
    return largest;
}

/* Choose enough buckets to keep every thread busy, but so few rows in each that its lookup table stays in the cache. Rows are
 * fetched in advance only within a bucket, so a small gradient has fewer buckets, unless it is much smaller than the lookup
 * table would be. */
static void choose_buckets(sparse_step *step)
{
    enum { IDS_PER_BUCKET = 1024 };
    const int64_t rows = step->tables->table->rows;
    while (step->shift < 15 && ((rows >> step->shift) > 256 || ((rows >> step->shift) > step->n / IDS_PER_BUCKET &&
                                                                ((int64_t)1 << step->shift) <= 2 * step->n)))
        step->shift++;
    while ((rows >> step->shift) > 4096)
        step->shift++;
    step->buckets = ((rows - 1) >> step->shift) + 1;
}

/* Process every bucket. Returns -1 when done, -2 if memory ran out, or else the position of an id that is out of range. In
 * the latter two cases no bucket was processed. */
static int64_t process_buckets(sparse_step *step, int64_t threads, parallel_for_fn *parallel_for)
{
    int64_t result = -2;
    if (step->n >= (int64_t)UINT32_MAX)
        return result;
    int64_t width = 0;
    for (int64_t i = 0; i < step->count; i++)
        width += step->tables[i].table->width;
    if (step->n * width <= 16384) { /* too little work to wake another thread */
        parallel_for = cadam_run_inline;
        threads = 1;
    }
    step->chunks = threads;
    step->offsets = calloc((size_t)(step->chunks * step->buckets), sizeof *step->offsets);
    step->starts = malloc((size_t)(step->buckets + 1) * sizeof *step->starts);
    step->entries = malloc((size_t)(step->n + 1) * sizeof *step->entries);
    step->distinct = calloc((size_t)threads, sizeof *step->distinct);
    if (!step->offsets || !step->starts || !step->entries || !step->distinct)
        goto done;
    parallel_for(0, step->chunks, 1, count_range, step);
    if (step->invalid >= 0) {
        result = step->invalid;
        goto done;
    }
    const int64_t largest = compute_offsets(step), bucket_rows = (int64_t)1 << step->shift;
    const int64_t most_distinct = largest < bucket_rows ? largest : bucket_rows;
    for (int64_t i = 0; i < threads; i++) {
        distinct_rows *rows = &step->distinct[i];
        rows->number_of = calloc((size_t)bucket_rows, sizeof(uint32_t));
        rows->distinct = malloc((size_t)(most_distinct + 1) * sizeof(uint32_t));
        rows->ends = malloc((size_t)(most_distinct + 1) * sizeof(uint32_t));
        rows->positions = malloc((size_t)(largest + 1) * sizeof(uint32_t));
        if (!rows->number_of || !rows->distinct || !rows->ends || !rows->positions)
            goto done;
    }
    parallel_for(0, step->chunks, 1, distribute_range, step);
    parallel_for(0, threads, 1, bucket_range, step);
    result = -1;
done:
    for (int64_t i = 0; step->distinct && i < threads; i++) {
        free(step->distinct[i].number_of);
        free(step->distinct[i].distinct);
        free(step->distinct[i].ends);
        free(step->distinct[i].positions);
    }
    free(step->distinct);
    free(step->entries);
    free(step->starts);
    free(step->offsets);
    return result;
}

/* Advance the step counts of some tables and update the rows that `ids` names. The tables have the same number of rows. For
 * each table, `grads` has its gradient rows, and `c` MAX_COEFFICIENTS doubles for each set of coefficients. Returns -1 when
 * done, -2 if memory ran out, or else the position of an id that is out of range. In the latter two cases nothing was
 * changed. */
EXPORT int64_t cadam_sparse_step(const sparse_table *tables, int64_t count, const int64_t *ids, int64_t n,
                                 const void *const *grads, const double *const *c, int64_t threads,
                                 parallel_for_fn *parallel_for)
{
    int64_t sets = 0, result = -2;
    for (int64_t i = 0; i < count; i++)
        sets += tables[i].coefficient_sets;
    table_step *work = calloc((size_t)count, sizeof *work);
    coefficients *converted = malloc((size_t)sets * sizeof *converted), *next = converted;
    sparse_step step = {.process_rows = update_rows, .set = cadam_instruction_set(), .tables = work, .count = count,
                        .ids = ids, .n = n, .invalid = -1};
    if (work && converted) {
        for (int64_t i = 0; i < count; i++) {
            const sparse_table *t = &tables[i];
            work[i].table = t;
            work[i].grads = grads[i];
            work[i].c = next;
            work[i].noise_key = noise_key((uint64_t)t->seed, next_step(*(const float *)t->step));
            for (int64_t set = 0; set < t->coefficient_sets; set++)
                convert_coefficients(next++, c[i] + set * MAX_COEFFICIENTS);
        }
        choose_buckets(&step);
        result = process_buckets(&step, threads, parallel_for);
    }
    for (int64_t i = 0; result == -1 && i < count; i++) {
        const sparse_table *t = &tables[i];
        *(float *)t->step = next_step(*(float *)t->step);
        if (t->counts) {
            ((int64_t *)t->counts)[0] += work[i].aligned;
            ((int64_t *)t->counts)[1] += work[i].touched;
            ((int64_t *)t->counts)[2] += t->rows * t->width;
        }
    }
    free(converted);
    free(work);
    return result;
}

/* Write the squared Euclidean norm of a sparse gradient, with duplicate ids summed, to `squared_norm`. Of `table` only rows,
 * width and dtypes are used. Returns the same values as cadam_sparse_step. */
EXPORT int64_t cadam_sparse_squared_norm(const sparse_table *table, const int64_t *ids, int64_t n, const void *grads,
                                         double *squared_norm, int64_t threads, parallel_for_fn *parallel_for)
{
    table_step work = {.table = table, .grads = grads};
    sparse_step step = {.process_rows = square_rows, .set = cadam_instruction_set(), .tables = &work, .count = 1,
                        .ids = ids, .n = n, .invalid = -1};
    choose_buckets(&step);
    work.squares = calloc((size_t)step.buckets, sizeof *work.squares);
    const int64_t result = work.squares ? process_buckets(&step, threads, parallel_for) : -2;
    *squared_norm = 0;
    for (int64_t b = 0; result == -1 && b < step.buckets; b++)
        *squared_norm += work.squares[b];
    free(work.squares);
    return result;
}

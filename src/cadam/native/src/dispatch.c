/* What Python calls: a whole step over all dense tensors, or over the rows of one table, or the norm of the gradients
 * of such rows, in one call.
 *
 * Work is cut into ranges by size alone and handed to torch's threads; who gets which range changes nothing in
 * the result.
 */
#include "cadam.h"

#include <stdlib.h>
#include <string.h>

extern const instruction_set cadam_portable;
#ifdef __x86_64__
extern const instruction_set cadam_avx2, cadam_avx512;
#endif

static int chosen = -1; /* set by cadam_limit_instruction_set, for tests and curiosity */

const instruction_set *cadam_instruction_set(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const int best = avx512 ? 2 : avx2 ? 1 : 0;
    const int level = chosen < 0 || chosen > best ? best : chosen;
    return level == 2 ? &cadam_avx512 : level == 1 ? &cadam_avx2 : &cadam_portable;
#else
    return &cadam_portable;
#endif
}

/* Use at most this instruction set (0 portable, 1 AVX2, 2 AVX-512; -1 the best there is). Returns the one in use. */
EXPORT int cadam_limit_instruction_set(int level)
{
    chosen = level;
    const instruction_set *now = cadam_instruction_set();
#ifdef __x86_64__
    return now == &cadam_avx512 ? 2 : now == &cadam_avx2 ? 1 : 0;
#else
    return now != &cadam_portable;
#endif
}

/* What the sources were when this was compiled. */
EXPORT const char *cadam_fingerprint(void) { return FINGERPRINT; }

/* The number of a kernel by its name; -1 if there is none. */
EXPORT int cadam_kernel_index(const char *name)
{
    const instruction_set *set = cadam_instruction_set();
    for (int i = 0; i < set->count; i++)
        if (!strcmp(set->kernels[i].name, name))
            return i;
    return -1;
}

/* All of the work on the calling thread: for small work, and after a fork, where torch's threads do not exist. */
EXPORT int32_t cadam_run_inline(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context)
{
    (void)grain;
    f(begin, end, context);
    return 0;
}

/* The coefficients of a kernel in either arithmetic: tensors of both may share them. */
typedef struct {
    float f[MAX_COEFFICIENTS];
    double d[MAX_COEFFICIENTS];
} coefficients;

static void convert(coefficients *to, const double *from)
{
    for (int i = 0; i < MAX_COEFFICIENTS; i++) {
        to->f[i] = (float)from[i];
        to->d[i] = from[i];
    }
}

static const void *in_arithmetic_of(const coefficients *c, int64_t dtype)
{
    return dtype == F64 ? (const void *)c->d : (const void *)c->f;
}

static const int64_t size_of[DTYPES] = {[F32] = 4, [F64] = 8, [BF16] = 2, [F16] = 2};
static int64_t size_of_buffer(int64_t dtype, int64_t moments)
{
    return moments == CODED_INT8 ? 1 : moments == CODED_BF16 ? 2 : dtype == F64 ? 8 : 4;
}

/* Dense -------------------------------------------------------------------------------------------------- */

/* One tensor, as a row of 64-bit integers. */
typedef struct {
    int64_t p, g, s[MAX_BUFFERS], step, counts, n, kernel, dtype, c, scales[MAX_CODED], seed, moments;
} dense_tensor;

typedef struct {
    const instruction_set *set;
    const dense_tensor *tensors;
    const int64_t *first; /* in units: where each tensor begins among all, and the end of the last */
    int64_t count;
    const coefficients *c;
} dense_step;

enum { HALVES_AHEAD = 2 * CODED_BLOCK }; /* elements */
enum { UNIT = CODED_BLOCK }; /* elements; ranges are cut between units, so that blocks stay whole */

static uint32_t scramble(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

/* What the noise of a step comes from; `step` is counted from 1. */
static uint32_t noise_key(uint64_t seed, float step)
{
    return scramble((uint32_t)seed ^ scramble((uint32_t)(seed >> 32) ^ scramble((uint32_t)(int64_t)step)));
}

/* Coded moments of a parameter of half precision: block by block, which is updated as float32. */
static int64_t coded_halves(const instruction_set *set, const dense_tensor *x, uint16_t *p, const uint16_t *g,
                            void *const *s, uint8_t *const *scales, int64_t n, int64_t place, uint32_t key, const void *c)
{
    coded_fn *update = set->kernels[x->kernel].coded[x->moments];
    const int64_t size = size_of_buffer(x->dtype, x->moments);
    float values[CODED_BLOCK], grads[CODED_BLOCK];
    int64_t aligned = 0;
    for (int64_t i = 0; i < n; i += CODED_BLOCK) {
        const int64_t m = n - i < CODED_BLOCK ? n - i : CODED_BLOCK;
        void *here[MAX_BUFFERS];
        uint8_t *scale[MAX_CODED];
        for (int b = 0; b < MAX_BUFFERS; b++)
            here[b] = s[b] ? (char *)s[b] + i * size : 0;
        for (int b = 0; b < MAX_CODED; b++)
            scale[b] = scales[b] ? scales[b] + i / CODED_BLOCK : 0;
        for (int64_t line = 0; line < CODED_BLOCK; line += 32) {
            __builtin_prefetch(p + i + HALVES_AHEAD + line, 1);
            __builtin_prefetch(g + i + HALVES_AHEAD + line);
        }
        set->open[x->dtype](p + i, values, m);
        set->open[x->dtype](g + i, grads, m);
        aligned += update(values, grads, here, scale, m, (uint64_t)(place + i), key, c);
        set->close[x->dtype](p + i, values, m);
    }
    return aligned;
}

static void dense_range(int64_t begin, int64_t end, void *context)
{
    const dense_step *step = context;
    int64_t low = 0, high = step->count; /* the tensor that holds unit `begin` */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (step->first[middle] <= begin)
            low = middle;
        else
            high = middle;
    }
    for (int64_t t = low; t < step->count && step->first[t] < end; t++) {
        const dense_tensor *x = &step->tensors[t];
        const int64_t from = begin > step->first[t] ? (begin - step->first[t]) * UNIT : 0;
        const int64_t limit = (end - step->first[t]) * UNIT;
        const int64_t to = limit < x->n ? limit : x->n;
        if (from >= to)
            continue;
        const int64_t size = size_of[x->dtype], real = size_of_buffer(x->dtype, x->moments);
        void *s[MAX_BUFFERS];
        for (int k = 0; k < MAX_BUFFERS; k++)
            s[k] = x->s[k] ? (char *)x->s[k] + from * real : 0;
        const kernel *k = &step->set->kernels[x->kernel];
        const void *c = in_arithmetic_of(&step->c[x->c], x->dtype);
        char *p = (char *)x->p + from * size;
        const char *g = (const char *)x->g + from * size;
        int64_t aligned;
        if (x->moments) {
            uint8_t *scales[MAX_CODED];
            for (int b = 0; b < MAX_CODED; b++)
                scales[b] = x->scales[b] ? (uint8_t *)x->scales[b] + from / CODED_BLOCK : 0;
            const uint32_t key = noise_key((uint64_t)x->seed, *(const float *)x->step);
            if (x->dtype == F32)
                aligned = k->coded[x->moments]((float *)p, (const float *)g, s, scales, to - from, (uint64_t)from, key, c);
            else
                aligned = coded_halves(step->set, x, (uint16_t *)p, (const uint16_t *)g, s, scales, to - from, from, key, c);
        } else
            aligned = k->dense[x->dtype](p, g, s, to - from, c);
        if (x->counts)
            __atomic_fetch_add((int64_t *)x->counts, aligned, __ATOMIC_RELAXED);
    }
}

/* The step counts of all tensors. */
EXPORT void cadam_read_steps(const dense_tensor *tensors, int64_t count, double *steps)
{
    for (int64_t t = 0; t < count; t++)
        steps[t] = *(const float *)tensors[t].step;
}

/* Step every tensor: count it, update it. `c` has MAX_COEFFICIENTS doubles for each set of coefficients.
 * Returns 0, or 1 if memory ran out, with nothing changed. */
EXPORT int cadam_dense_step(const dense_tensor *tensors, int64_t count, const double *c, int64_t sets, int64_t grain,
                       parallel_for_fn *parallel_for)
{
    int64_t *first = malloc((size_t)(count + 1) * sizeof *first);
    coefficients *converted = malloc((size_t)(sets ? sets : 1) * sizeof *converted);
    if (!first || !converted) {
        free(first);
        free(converted);
        return 1;
    }
    for (int64_t i = 0; i < sets; i++)
        convert(&converted[i], c + i * MAX_COEFFICIENTS);
    int64_t units = 0;
    for (int64_t t = 0; t < count; t++) {
        const dense_tensor *x = &tensors[t];
        first[t] = units;
        units += (x->n + UNIT - 1) / UNIT;
        *(float *)x->step = next_step(*(float *)x->step);
        if (x->counts) {
            ((int64_t *)x->counts)[1] += x->n;
            ((int64_t *)x->counts)[2] += x->n;
        }
    }
    first[count] = units;
    dense_step step = {cadam_instruction_set(), tensors, first, count, converted};
    if (units)
        parallel_for(0, units, grain / UNIT, dense_range, &step);
    free(first);
    free(converted);
    return 0;
}

typedef struct {
    float *p, *m, *v;
    const float *g;
    update_fn *f;
} traffic;

static void traffic_range(int64_t begin, int64_t end, void *context)
{
    const traffic *t = context;
    const float unused = 0;
    void *s[MAX_BUFFERS] = {t->m + begin, t->v + begin};
    t->f(t->p + begin, t->g + begin, s, end - begin, &unused);
}

/* Move what a step of Adam over n float32 elements moves: the speed limit of this machine. */
EXPORT void cadam_memory_traffic(float *p, const float *g, float *m, float *v, int64_t n, parallel_for_fn *parallel_for)
{
    traffic t = {p, m, v, g, cadam_instruction_set()->traffic};
    parallel_for(0, n, n / 1024 + 1, traffic_range, &t);
}

/* Rows --------------------------------------------------------------------------------------------------- */

/* From raw ids and row gradients to the updated table, without a sort:
 *   1. the ids are dealt stably into buckets of neighbouring rows;
 *   2. within a bucket a small table finds repeated ids, and the positions of each row's gradients are put together;
 *   3. the gradients of each row are summed in order of appearance, and the row is updated.
 * All that is stable, so the result depends neither on the sizes of chunks and buckets nor on the number of threads. */

typedef struct {
    int64_t p, s[MAX_BUFFERS], step, counts, rows, width, kernel, dtype, scales[MAX_CODED], seed, moments;
    int64_t by_row;                 /* bit k: buffer k has one number a row */
    int64_t row_steps, set_of, sets; /* where rows count their own steps: the counts, as in row_batch, how many sets */
    int64_t grad_dtype;              /* as in row_batch */
} row_table;

typedef struct {
    const int64_t *ids;
    int64_t last;
    int bad;
} id_check;

/* An id is negative, or the last row less the id is, where it is out of range. */
static void check_range(int64_t begin, int64_t end, void *context)
{
    id_check *check = context;
    uint64_t signs = 0;
    for (int64_t i = begin; i < end; i++)
        signs |= (uint64_t)check->ids[i] | ((uint64_t)check->last - (uint64_t)check->ids[i]);
    if (signs >> 63)
        __atomic_store_n(&check->bad, 1, __ATOMIC_RELAXED);
}

/* The position of the first of n ids that is out of range, or -1. */
EXPORT int64_t cadam_check_ids(const int64_t *ids, int64_t n, int64_t rows, parallel_for_fn *parallel_for)
{
    enum { GRAIN = 32768 };
    id_check check = {ids, rows - 1, 0};
    if (n > GRAIN)
        parallel_for(0, n, GRAIN, check_range, &check);
    else
        check_range(0, n, &check);
    for (int64_t i = 0; check.bad && i < n; i++)
        if ((uint64_t)ids[i] >= (uint64_t)rows)
            return i;
    return -1;
}

/* What a thread needs to find the distinct rows of a bucket. */
typedef struct {
    uint32_t *slot;     /* by row: one more than its number among the distinct ones, or 0 */
    uint32_t *distinct; /* by number: the row */
    uint32_t *ends;     /* by number: how often it appears, then where its positions begin, then where they end */
    uint32_t *at;       /* positions by row, then in order of appearance */
} found_rows;

typedef struct row_step row_step;

struct row_step {
    void (*do_bucket)(row_step *step, int64_t bucket, found_rows *my);
    const instruction_set *set;
    const row_table *table;
    const int64_t *ids;
    const char *grads;
    int64_t n, shift, buckets, chunks;
    uint32_t *offsets; /* [chunks][buckets]: counts, then where each chunk's share of a bucket begins */
    uint32_t *starts;  /* [buckets + 1] */
    entry *entries;    /* by bucket, then in order of appearance */
    found_rows *found; /* by thread */
    int64_t bad, next;
    uint32_t key;
    const coefficients *c; /* of an update, and what it counts */
    int64_t aligned, touched;
    double *squares; /* by bucket */
};

static int64_t chunk_begin(const row_step *step, int64_t chunk) { return step->n * chunk / step->chunks; }

static void count_range(int64_t begin, int64_t end, void *context)
{
    row_step *step = context;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        uint32_t *offsets = step->offsets + chunk * step->buckets;
        for (int64_t i = chunk_begin(step, chunk), last = chunk_begin(step, chunk + 1); i < last; i++) {
            const int64_t id = step->ids[i];
            if ((uint64_t)id >= (uint64_t)step->table->rows) {
                int64_t known = -1; /* any one bad position will do for the message */
                __atomic_compare_exchange_n(&step->bad, &known, i, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
                return;
            }
            offsets[id >> step->shift]++;
        }
    }
}

/* A bucket's share lies in memory that no cache knows yet. */
enum { DEAL_AHEAD = 16 };

static void deal_range(int64_t begin, int64_t end, void *context)
{
    row_step *step = context;
    const int64_t mask = ((int64_t)1 << step->shift) - 1;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        uint32_t *offsets = step->offsets + chunk * step->buckets;
        for (int64_t i = chunk_begin(step, chunk), last = chunk_begin(step, chunk + 1); i < last; i++) {
            const int64_t id = step->ids[i];
            entry *to = &step->entries[offsets[id >> step->shift]++];
            __builtin_prefetch(to + DEAL_AHEAD, 1);
            *to = (entry){(uint32_t)(id & mask), (uint32_t)i};
        }
    }
}

/* Find the distinct rows of n entries and put the positions of each together. Returns how many rows there are.
 * Whether a row is new cannot be foreseen, so there is no branch on it. */
static int64_t find_rows(entry *entries, int64_t n, found_rows *my)
{
    uint32_t *slot = my->slot, *distinct = my->distinct, *ends = my->ends;
    uint32_t count = 0, total = 0;
    ends[0] = 0;
    for (int64_t e = 0; e < n; e++) {
        const uint32_t row = entries[e].row, known = slot[row], fresh = known == 0;
        distinct[count] = row;
        count += fresh;
        ends[count] = 0;
        const uint32_t number = known + (count & -fresh);
        slot[row] = number;
        entries[e].row = number - 1;
        ends[number - 1]++;
    }
    for (uint32_t d = 0; d < count; d++) {
        const uint32_t times = ends[d];
        ends[d] = total;
        total += times;
        slot[distinct[d]] = 0;
    }
    for (int64_t e = 0; e < n; e++)
        my->at[ends[entries[e].row]++] = entries[e].at;
    return count;
}

static row_batch rows_of(const row_step *step, int64_t bucket, found_rows *my)
{
    const int64_t first = step->starts[bucket], n = step->starts[bucket + 1] - first;
    const int64_t distinct = find_rows(step->entries + first, n, my);
    return (row_batch){.count = distinct, .width = step->table->width, .dtype = step->table->dtype,
                       .grad_dtype = step->table->grad_dtype, .distinct = my->distinct, .ends = my->ends,
                       .at = my->at, .grads = step->grads};
}

static void square_bucket(row_step *step, int64_t bucket, found_rows *my)
{
    const row_batch rows = rows_of(step, bucket, my);
    step->squares[bucket] = step->set->squares[step->table->dtype](&rows);
}

static void update_bucket(row_step *step, int64_t bucket, found_rows *my)
{
    const row_table *t = step->table;
    const int64_t row = bucket << step->shift;
    row_batch rows = rows_of(step, bucket, my);
    rows.p = (char *)t->p + row * t->width * size_of[t->dtype];
    for (int b = 0; b < step->set->kernels[t->kernel].buffers; b++)
        rows.s[b] = (char *)t->s[b] +
                    row * (t->by_row >> b & 1 ? (int64_t)sizeof(float) : t->width * size_of_buffer(t->dtype, t->moments));
    for (int b = 0; b < MAX_CODED; b++)
        rows.scales[b] = t->scales[b] ? (uint8_t *)t->scales[b] + row : 0;
    rows.place = (uint64_t)(row * t->width);
    rows.key = step->key;
    rows.steps = t->row_steps ? (int32_t *)t->row_steps + row : 0;
    rows.set_of = (const int32_t *)t->set_of;
    rows.set_size = sizeof(coefficients);
    const kernel *k = &step->set->kernels[t->kernel];
    rows_fn *plain = t->grad_dtype == t->dtype ? k->rows[t->dtype] : k->mixed_rows[t->dtype];
    rows_fn *update = t->by_row ? k->by_row[t->moments] : t->moments ? k->coded_rows[t->moments] : plain;
    const int64_t aligned = update(&rows, in_arithmetic_of(step->c, t->dtype));
    __atomic_fetch_add(&step->aligned, aligned, __ATOMIC_RELAXED);
    __atomic_fetch_add(&step->touched, rows.count * t->width, __ATOMIC_RELAXED);
}

static void bucket_range(int64_t begin, int64_t end, void *context)
{
    row_step *step = context;
    for (int64_t worker = begin; worker < end; worker++)
        for (;;) {
            const int64_t bucket = __atomic_fetch_add(&step->next, 1, __ATOMIC_RELAXED);
            if (bucket >= step->buckets)
                break;
            if (step->starts[bucket] < step->starts[bucket + 1])
                step->do_bucket(step, bucket, &step->found[worker]);
        }
}

/* Turn the counts of chunks into where their shares begin. Returns the size of the largest bucket. */
static int64_t lay_out(row_step *step)
{
    uint32_t total = 0, largest = 0;
    for (int64_t b = 0; b < step->buckets; b++) {
        step->starts[b] = total;
        for (int64_t chunk = 0; chunk < step->chunks; chunk++) {
            uint32_t *share = &step->offsets[chunk * step->buckets + b];
            const uint32_t count = *share;
            *share = total;
            total += count;
        }
        if (total - step->starts[b] > largest)
            largest = total - step->starts[b];
    }
    step->starts[step->buckets] = total;
    return largest;
}

/* Enough buckets for every thread, few enough rows in each for its table to stay in the cache. */
static void choose_buckets(row_step *step)
{
    const int64_t rows = step->table->rows;
    while (step->shift < 15 && (rows >> step->shift) > 256)
        step->shift++;
    while ((rows >> step->shift) > 4096)
        step->shift++;
    step->buckets = ((rows - 1) >> step->shift) + 1;
}

/* Do every bucket. Returns -1 when done, -2 if memory ran out, else the position of an id that is out of range; in both
 * latter cases no bucket was begun. */
static int64_t do_buckets(row_step *step, int64_t threads, parallel_for_fn *parallel_for)
{
    int64_t result = -2;
    if (step->n >= (int64_t)UINT32_MAX)
        return result;
    if (step->n * step->table->width <= 16384) { /* not worth waking another thread */
        parallel_for = cadam_run_inline;
        threads = 1;
    }
    step->chunks = threads;
    step->offsets = calloc((size_t)(step->chunks * step->buckets), sizeof *step->offsets);
    step->starts = malloc((size_t)(step->buckets + 1) * sizeof *step->starts);
    step->entries = malloc((size_t)(step->n + 1) * sizeof *step->entries);
    step->found = calloc((size_t)threads, sizeof *step->found);
    if (!step->offsets || !step->starts || !step->entries || !step->found)
        goto done;
    parallel_for(0, step->chunks, 1, count_range, step);
    if (step->bad >= 0) {
        result = step->bad;
        goto done;
    }
    const int64_t largest = lay_out(step), span = (int64_t)1 << step->shift, most = largest < span ? largest : span;
    for (int64_t i = 0; i < threads; i++) {
        step->found[i].slot = calloc((size_t)span, sizeof(uint32_t));
        step->found[i].distinct = malloc((size_t)(most + 1) * sizeof(uint32_t));
        step->found[i].ends = malloc((size_t)(most + 1) * sizeof(uint32_t));
        step->found[i].at = malloc((size_t)(largest + 1) * sizeof(uint32_t));
        if (!step->found[i].slot || !step->found[i].distinct || !step->found[i].ends || !step->found[i].at)
            goto done;
    }
    parallel_for(0, step->chunks, 1, deal_range, step);
    parallel_for(0, threads, 1, bucket_range, step);
    result = -1;
done:
    for (int64_t i = 0; step->found && i < threads; i++) {
        free(step->found[i].slot);
        free(step->found[i].distinct);
        free(step->found[i].ends);
        free(step->found[i].at);
    }
    free(step->found);
    free(step->entries);
    free(step->starts);
    free(step->offsets);
    return result;
}

/* Step `table`: count it, update the rows that `ids` name. `c` has MAX_COEFFICIENTS doubles for each set. Returns -1 when done, -2 if memory ran out, else the position of an
 * id that is out of range; in both latter cases nothing was changed. */
EXPORT int64_t cadam_sparse_step(const row_table *table, const int64_t *ids, int64_t n, const void *grads, const double *c,
                          int64_t threads, parallel_for_fn *parallel_for)
{
    row_step step = {
        .do_bucket = update_bucket, .set = cadam_instruction_set(), .table = table, .ids = ids, .grads = grads, .n = n, .bad = -1};
    choose_buckets(&step);
    coefficients *converted = malloc((size_t)table->sets * sizeof *converted);
    for (int64_t i = 0; converted && i < table->sets; i++)
        convert(&converted[i], c + i * MAX_COEFFICIENTS);
    step.c = converted;
    step.key = noise_key((uint64_t)table->seed, next_step(*(const float *)table->step));
    const int64_t result = converted ? do_buckets(&step, threads, parallel_for) : -2;
    free(converted);
    if (result != -1)
        return result;
    *(float *)table->step = next_step(*(float *)table->step);
    if (table->counts) {
        ((int64_t *)table->counts)[0] += step.aligned;
        ((int64_t *)table->counts)[1] += step.touched;
        ((int64_t *)table->counts)[2] += table->rows * table->width;
    }
    return result;
}

/* Into `squares`: the sum of the squares of row gradients, duplicates summed. Of `table` only rows, width and dtype count.
 * Returns as cadam_sparse_step. */
EXPORT int64_t cadam_sparse_squared_norm(const row_table *table, const int64_t *ids, int64_t n, const void *grads, double *squares,
                                  int64_t threads, parallel_for_fn *parallel_for)
{
    row_step step = {
        .do_bucket = square_bucket, .set = cadam_instruction_set(), .table = table, .ids = ids, .grads = grads, .n = n, .bad = -1};
    choose_buckets(&step);
    step.squares = calloc((size_t)step.buckets, sizeof *step.squares);
    const int64_t result = step.squares ? do_buckets(&step, threads, parallel_for) : -2;
    *squares = 0;
    for (int64_t b = 0; result == -1 && b < step.buckets; b++)
        *squares += step.squares[b];
    free(step.squares);
    return result;
}

/* A step over all dense tensors in one call.
 *
 * The elements of all tensors are cut into ranges by size alone and handed to torch's threads. Which thread gets which
 * range changes nothing in the result.
 */
#include "structs.h"

#include <stdlib.h>

typedef struct {
    const instruction_set *set;
    const dense_tensor *tensors;
    const int64_t *first_unit; /* the unit in which each tensor begins, and the end of the last tensor */
    int64_t count;
    const coefficients *c;
} dense_step;

enum { UNIT = QUANTIZATION_BLOCK }; /* elements; ranges end between units, so that no quantization block is cut */
enum { PREFETCH_DISTANCE = 2 * QUANTIZATION_BLOCK }; /* elements */

/* Update a parameter of half precision with quantized moments. Each block is converted to float32 and back. */
static int64_t update_quantized_half(const instruction_set *set, const dense_tensor *x, uint16_t *p, const uint16_t *g,
                                     void *const *s, uint8_t *const *scales, int64_t n, int64_t position, uint32_t key,
                                     const void *c)
{
    quantized_update_fn *update = set->kernels[x->kernel].quantized[x->moments];
    const int64_t size = state_size(x->dtype, x->moments);
    float values[QUANTIZATION_BLOCK], grads[QUANTIZATION_BLOCK];
    int64_t aligned = 0;
    for (int64_t i = 0; i < n; i += QUANTIZATION_BLOCK) {
        const int64_t m = n - i < QUANTIZATION_BLOCK ? n - i : QUANTIZATION_BLOCK;
        void *block_state[MAX_BUFFERS];
        uint8_t *block_scales[MAX_QUANTIZED];
        for (int b = 0; b < MAX_BUFFERS; b++)
            block_state[b] = s[b] ? (char *)s[b] + i * size : 0;
        for (int b = 0; b < MAX_QUANTIZED; b++)
            block_scales[b] = scales[b] ? scales[b] + i / QUANTIZATION_BLOCK : 0;
        for (int64_t line = 0; line < QUANTIZATION_BLOCK; line += 32) {
            __builtin_prefetch(p + i + PREFETCH_DISTANCE + line, 1);
            __builtin_prefetch(g + i + PREFETCH_DISTANCE + line);
        }
        set->widen[x->dtype](p + i, values, m);
        set->widen[x->dtype](g + i, grads, m);
        aligned += update(values, grads, block_state, block_scales, m, (uint64_t)(position + i), key, c);
        set->narrow[x->dtype](p + i, values, m);
    }
    return aligned;
}

/* Update the elements begin to end of one tensor. */
static void update_elements(const dense_step *step, const dense_tensor *x, int64_t begin, int64_t end)
{
    const int64_t n = end - begin, state_bytes = state_size(x->dtype, x->moments);
    const kernel *k = &step->set->kernels[x->kernel];
    const void *c = coefficients_for(&step->c[x->coefficient_set], x->dtype);
    char *p = (char *)x->param + begin * param_size(x->dtype);
    const char *g = (const char *)x->grad + begin * param_size(x->dtype);
    void *s[MAX_BUFFERS];
    for (int b = 0; b < MAX_BUFFERS; b++)
        s[b] = x->state[b] ? (char *)x->state[b] + begin * state_bytes : 0;
    int64_t aligned;
    if (x->moments) {
        uint8_t *scales[MAX_QUANTIZED];
        for (int b = 0; b < MAX_QUANTIZED; b++)
            scales[b] = x->scales[b] ? (uint8_t *)x->scales[b] + begin / QUANTIZATION_BLOCK : 0;
        const uint32_t key = noise_key((uint64_t)x->seed, *(const float *)x->step);
        if (x->dtype == F32)
            aligned = k->quantized[x->moments]((float *)p, (const float *)g, s, scales, n, (uint64_t)begin, key, c);
        else
            aligned = update_quantized_half(step->set, x, (uint16_t *)p, (const uint16_t *)g, s, scales, n, begin, key, c);
    } else
        aligned = k->dense[x->dtype](p, g, s, n, c);
    if (x->counts)
        __atomic_fetch_add((int64_t *)x->counts, aligned, __ATOMIC_RELAXED);
}

/* Update all elements in the units begin to end. */
static void update_units(int64_t begin, int64_t end, void *context)
{
    const dense_step *step = context;
    int64_t low = 0, high = step->count; /* binary search for the tensor that holds unit `begin` */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (step->first_unit[middle] <= begin)
            low = middle;
        else
            high = middle;
    }
    for (int64_t t = low; t < step->count && step->first_unit[t] < end; t++) {
        const dense_tensor *x = &step->tensors[t];
        const int64_t first = begin > step->first_unit[t] ? (begin - step->first_unit[t]) * UNIT : 0;
        const int64_t limit = (end - step->first_unit[t]) * UNIT;
        const int64_t last = limit < x->elements ? limit : x->elements;
        if (first < last)
            update_elements(step, x, first, last);
    }
}

/* Read the step counts of all tensors. */
EXPORT void cadam_read_steps(const dense_tensor *tensors, int64_t count, double *steps)
{
    for (int64_t t = 0; t < count; t++)
        steps[t] = *(const float *)tensors[t].step;
}

/* Advance the step count of every tensor and update it. `c` holds MAX_COEFFICIENTS doubles for each set of coefficients.
 * Returns 0, or 1 if memory ran out; then nothing was changed. */
EXPORT int cadam_dense_step(const dense_tensor *tensors, int64_t count, const double *c, int64_t sets, int64_t grain,
                            parallel_for_fn *parallel_for)
{
    int64_t *first_unit = malloc((size_t)(count + 1) * sizeof *first_unit);
    coefficients *converted = malloc((size_t)(sets ? sets : 1) * sizeof *converted);
    if (!first_unit || !converted) {
        free(first_unit);
        free(converted);
        return 1;
    }
    for (int64_t i = 0; i < sets; i++)
        convert_coefficients(&converted[i], c + i * MAX_COEFFICIENTS);
    int64_t units = 0;
    for (int64_t t = 0; t < count; t++) {
        const dense_tensor *x = &tensors[t];
        first_unit[t] = units;
        units += (x->elements + UNIT - 1) / UNIT;
        *(float *)x->step = next_step(*(float *)x->step);
        if (x->counts) {
            ((int64_t *)x->counts)[1] += x->elements;
            ((int64_t *)x->counts)[2] += x->elements;
        }
    }
    first_unit[count] = units;
    dense_step step = {cadam_instruction_set(), tensors, first_unit, count, converted};
    if (units)
        parallel_for(0, units, grain / UNIT, update_units, &step);
    free(first_unit);
    free(converted);
    return 0;
}

typedef struct {
    float *p, *m, *v;
    const float *g;
    update_fn *f;
} memory_traffic;

static void move_range(int64_t begin, int64_t end, void *context)
{
    const memory_traffic *t = context;
    const float unused = 0;
    void *s[MAX_BUFFERS] = {t->m + begin, t->v + begin};
    t->f(t->p + begin, t->g + begin, s, end - begin, &unused);
}

/* Read and write the memory that a step of Adam over n float32 elements reads and writes. Benchmarks take the time of this
 * call as the speed limit of the machine. */
EXPORT void cadam_memory_traffic(float *p, const float *g, float *m, float *v, int64_t n, parallel_for_fn *parallel_for)
{
    memory_traffic t = {p, m, v, g, cadam_instruction_set()->memory_traffic};
    parallel_for(0, n, n / 1024 + 1, move_range, &t);
}

/* The input layer of the models of cadam.online.models for a batch of events: from the columns of the features to the
 * embeddings of all fields and one term per event, and back from their gradients to the gradients of the parameters.
 *
 * Inputs in online/models/inputs.py defines the computation. An entry is one id of an event, that is, one row of the tables:
 * a single id has one entry, a list of ids several, and a number the entry of its bin. The entries of lists follow those of
 * single ids, and the entries of numbers are the last ones.
 */
#include "number_ranks.h"
#include "structs.h"

#include <stdlib.h>
#include <string.h>

enum { ENTRIES_AHEAD = 32 }; /* rows are fetched into the cache this many entries before they are used */
enum { DEFAULT_WIDTH = 8 };  /* loops over embeddings of this width are unrolled */

/* Write the rows of the entries that are ids. Returns 0 if an id is not a row of its feature. Some events are written
 * together, so that their rows stay in the cache until all features have been read. */
static int write_rows(const input_layer *m, const input_batch *b)
{
    enum { EVENTS = 32 };
    const int64_t entries = m->entries + m->numbers;
    uint64_t signs = 0; /* the sign bit is set if an id was negative or too large */
    for (int64_t begin = 0; begin < b->n; begin += EVENTS) {
        const int64_t end = begin + EVENTS < b->n ? begin + EVENTS : b->n;
        for (int64_t f = 0, first = 0; f < m->id_features; first += m->lengths[f++]) {
            const int64_t length = m->lengths[f], start = m->starts[f];
            const int64_t *ids = (const int64_t *)b->columns[f] + begin * length;
            const uint64_t last = (uint64_t)m->sizes[f] - 1;
            for (int64_t i = begin; i < end; i++)
                for (int64_t e = 0; e < length; e++) {
                    const int64_t id = *ids++;
                    signs |= (uint64_t)id | (last - (uint64_t)id);
                    b->rows[i * entries + first + e] = start + id;
                }
        }
    }
    return !(signs >> 63);
}

/* Write the weight of each entry in the mean of its list. Single ids have the weight 1. */
static void write_weights(const input_layer *m, const input_batch *b)
{
    for (int64_t f = 0, first = 0; f < m->id_features; first += m->lengths[f++]) {
        const int64_t *ids = b->columns[f], length = m->lengths[f];
        for (int64_t i = 0; i < b->n; i++, ids += length) {
            float *weights = b->weights + i * m->entries + first, present = 0;
            for (int64_t e = 0; e < length; e++) {
                weights[e] = !m->zero_is_missing[f] || ids[e] > 0;
                present += weights[e];
            }
            for (int64_t e = 0; e < length; e++)
                weights[e] /= present > 1 ? present : 1;
        }
    }
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Add n values of numeric feature j, `stride` apart, to its sorted sample. `slots` and `fresh` have room for a sample, and
 * `is_replaced` for a byte for each value of a sample. */
static void update_sample(const input_layer *m, int64_t j, const double *values, int64_t stride, int64_t n, double *slots,
                          double *fresh, char *is_replaced)
{
    const int64_t size = m->sample_size, count = m->count[j], shift = sampling_shift(count, size, m->max_shift);
    double *sample = m->sample + j * size;
    int64_t total = count, replaced = 0;
    for (int64_t i = 0; i < n; i++)
        total += !isnan(values[i * stride]);
    /* If there are more than `size` replacements, only the last ones remain. */
    const int64_t begin = ((total - 1) >> shift) - size;
    memset(is_replaced, 0, (size_t)size);
    for (int64_t i = 0, index = count; i < n; i++) {
        const double x = values[i * stride];
        if (isnan(x))
            continue;
        const int64_t number = index >> shift, slot = index < size ? index : number * m->slot_stride % size;
        if (number << shift == index++ && number > begin) {
            if (!is_replaced[slot] || slots[slot] < x) /* The larger one of two values for the same slot counts. */
                slots[slot] = x;
            is_replaced[slot] = 1;
        }
    }
    m->count[j] = total;
    int64_t kept = 0;
    for (int64_t slot = 0; slot < size; slot++)
        if (is_replaced[slot])
            fresh[replaced++] = slots[slot];
        else
            sample[kept++] = sample[slot];
    if (!replaced)
        return;
    qsort(fresh, (size_t)replaced, sizeof *fresh, compare_doubles);
    /* Merge from the end, where the values that were removed have left room. */
    for (int64_t to = size; replaced;)
        sample[--to] = kept && sample[kept - 1] > fresh[replaced - 1] ? sample[--kept] : fresh[--replaced];
}

/* Add the numbers of a batch to the samples. Returns 0 if memory ran out; then nothing was changed. */
static int update_samples(const input_layer *m, const input_batch *b)
{
    double *slots = malloc((size_t)m->sample_size * (2 * sizeof(double) + 1));
    if (!slots)
        return 0;
    double *fresh = slots + m->sample_size;
    for (int64_t f = m->id_features, j = 0; j < m->numbers; j += m->lengths[f++])
        for (int64_t k = 0; k < m->lengths[f]; k++)
            update_sample(m, j + k, (const double *)b->columns[f] + k, m->lengths[f], b->n, slots, fresh,
                          (char *)(fresh + m->sample_size));
    free(slots);
    return 1;
}

#define REAL float
#define NAMED(name) name##_f32
#include "batch_inputs_kernels.h"
#undef REAL
#undef NAMED
#define REAL double
#define NAMED(name) name##_f64
#include "batch_inputs_kernels.h"

/* Add the numbers of a batch to the samples. Returns -1 when done, -2 if memory ran out; then the samples are unchanged. */
EXPORT int64_t cadam_inputs_add_numbers(const input_layer *m, const input_batch *b)
{
    return !m->numbers || update_samples(m, b) ? -1 : -2;
}

/* Compute the embeddings and the terms of a batch. In training mode, the numbers of the batch are added to the samples
 * afterwards. Returns -1 when done, -2 if memory ran out, or 0 if an id is not a row of its feature; in the latter two cases
 * the samples are unchanged. */
EXPORT int64_t cadam_inputs_forward(const input_layer *m, const input_batch *b)
{
    if (!write_rows(m, b))
        return 0;
    if (b->weights)
        write_weights(m, b);
    if (m->dtype == F64)
        write_numbers_f64(m, b);
    else
        write_numbers_f32(m, b);
    if (b->is_training && cadam_inputs_add_numbers(m, b) != -1)
        return -2;
    if (m->dtype == F64)
        forward_f64(m, b);
    else
        forward_f32(m, b);
    return -1;
}

/* Compute the gradients of the parameters from those of the embeddings and the terms. Returns -1 when done, -2 if memory ran
 * out. */
EXPORT int64_t cadam_inputs_backward(const input_layer *m, const input_batch *b)
{
    return m->dtype == F64 ? backward_f64(m, b) : backward_f32(m, b);
}

/* Models that learn from one event at a time (batch size 1): predict an event, learn from it, continue with the next one; a
 * chunk of events in one call.
 *
 * The models are those of cadam.online.models that are sums over the fields of an event: a bias, a weight for each row (and
 * a slope for each numeric feature), and for a factorization machine the inner products of all pairs of the fields'
 * embeddings. The loss is the log loss of a logit. Parameters are updated by the kernels of rules.h, the two tables by the
 * sparse kernels and all others by the dense ones, so that nothing in this file depends on the rule.
 */
#include "number_ranks.h"
#include "structs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS_AHEAD = 12 }; /* rows are fetched into the cache this many events before they are used */

/* The memory in which one event is processed. The entries of an event are the rows that it names; the entries of its
 * numeric features come last. */
typedef struct {
    const event_model *m;
    const kernel *kernel;
    int64_t entries, fields; /* including those of the numeric features */
    int64_t width;           /* width of an embedding; 0 if the model has none */
    uint32_t *row;           /* by entry */
    float *weight;           /* by entry */
    float *scaled;           /* by numeric feature: the normalized number */
    float *field;            /* [fields][width]: embeddings */
    float *sum, *squares;    /* [width]: sum of the fields' embeddings, and of their squares */
    uint32_t *distinct, *ends, *positions; /* as in row_batch */
    float *linear_grads, *table_grads, *number_grads;
    const int32_t *field_of, *alike_from;
    void *memory;
} workspace;

static const float *embedding(const workspace *w, int64_t e)
{
    return (const float *)w->m->table.param + (int64_t)w->row[e] * w->width;
}

/* Normalize the numeric features of an event to their ranks in the samples, and the ranks to normal numbers. Also find the row
 * of each number's bin. */
static void normalize_numbers(const workspace *w, const double *numbers)
{
    const event_model *m = w->m;
    for (int64_t j = 0; j < m->numbers; j++) {
        const int missing = isnan(numbers[j]);
        const double *sample = (const double *)m->sample + j * m->sample_size;
        const int64_t count = ((const int64_t *)m->count)[j], known = count < m->sample_size ? count : m->sample_size;
        double rank;
        int64_t both;
        find_ranks(sample, known, &numbers[j], &rank, &both, 1);
        w->scaled[j] = isinf(numbers[j]) ? NAN : (float)normal_number(rank); /* the score will be NaN */
        const int64_t bin = missing ? m->bins : (int64_t)((double)m->bins * rank);
        w->row[m->entries + j] = (uint32_t)(((const int64_t *)m->bin_starts)[j] + bin);
    }
}

/* Add the numeric features of an event to the sorted samples of earlier values. */
static void update_samples(const event_model *m, const double *numbers)
{
    for (int64_t j = 0; j < m->numbers; j++) {
        if (isnan(numbers[j]))
            continue;
        double *sample = (double *)m->sample + j * m->sample_size;
        const int64_t size = m->sample_size, index = ((int64_t *)m->count)[j]++;
        const int64_t shift = sampling_shift(index, size, m->max_shift), number = index >> shift;
        const int64_t slot = index < size ? index : number * m->slot_stride % size;
        if (number << shift != index)
            continue;
        /* Remove the value of the slot, then insert the new one where it keeps the order. */
        memmove(sample + slot, sample + slot + 1, (size_t)(size - 1 - slot) * sizeof(double));
        int64_t at;
        count_below(sample, size - 1, &numbers[j], &at, 1, 1);
        memmove(sample + at + 1, sample + at, (size_t)(size - 1 - at) * sizeof(double));
        sample[at] = numbers[j];
    }
}

/* Return the score of the event whose rows and weights are in `w`. The fields' embeddings and their sum stay in `w` for
 * the gradients. */
static float forward(const workspace *w)
{
    const event_model *m = w->m;
    float score = *(const float *)m->bias.param;
    if (m->linear.param) {
        const float *linear = (const float *)m->linear.param;
        float terms = 0;
        for (int64_t e = 0; e < w->entries; e++)
            terms += w->weight[e] * linear[w->row[e]];
        score += terms;
        if (m->slopes.param)
            for (int64_t j = 0; j < m->numbers; j++)
                score += w->scaled[j] * ((const float *)m->slopes.param)[j];
    }
    if (!m->table.param)
        return score;
    const int64_t width = w->width;
    memset(w->field, 0, (size_t)(w->fields * width) * sizeof(float));
    memset(w->sum, 0, 2 * (size_t)width * sizeof(float)); /* `squares` follows `sum` in memory */
    for (int64_t e = 0; e < w->entries; e++) {
        const float *v = embedding(w, e), weight = w->weight[e];
        float *into = w->field + w->field_of[e] * width;
        for (int64_t i = 0; i < width; i++)
            into[i] += weight * v[i];
    }
    for (int64_t j = 0; j < m->numbers && m->vectors.param; j++)
        for (int64_t i = 0; i < width; i++)
            w->field[(m->fields + j) * width + i] += w->scaled[j] * ((const float *)m->vectors.param)[j * width + i];
    for (int64_t f = 0; f < w->fields; f++)
        for (int64_t i = 0; i < width; i++) {
            const float v = w->field[f * width + i];
            w->sum[i] += v;
            w->squares[i] += v * v;
        }
    float pairs = 0;
    for (int64_t i = 0; i < width; i++)
        pairs += w->sum[i] * w->sum[i] - w->squares[i];
    return score + 0.5f * pairs;
}

/* Update a dense parameter. */
static void update_dense(const workspace *w, const event_parameter *x, const float *grads, const float *c)
{
    const int64_t n = x->rows * x->width;
    void *s[MAX_BUFFERS];
    for (int k = 0; k < MAX_BUFFERS; k++)
        s[k] = (void *)x->state[k];
    const int64_t aligned = w->kernel->dense[F32]((void *)x->param, grads, s, n, c);
    if (x->counts) {
        int64_t *counts = (int64_t *)x->counts;
        counts[0] += aligned, counts[1] += n, counts[2] += n;
    }
}

/* Update the rows of a table that the event names. */
static void update_rows(const workspace *w, const event_parameter *x, int64_t distinct, const float *grads, const float *c)
{
    row_batch rows = {.count = distinct, .width = x->width, .distinct = w->distinct, .ends = w->ends, .positions = w->positions,
                      .grads = grads, .p = (void *)x->param};
    for (int k = 0; k < MAX_BUFFERS; k++)
        rows.s[k] = (void *)x->state[k];
    const int64_t aligned = w->kernel->sparse[F32](&rows, c);
    if (x->counts) {
        int64_t *counts = (int64_t *)x->counts;
        counts[0] += aligned, counts[1] += distinct * x->width, counts[2] += x->rows * x->width;
    }
}

/* Find the distinct rows of the event and collect the entries of each, in order of appearance. Returns the number of
 * distinct rows. */
static int64_t collect_distinct_rows(const workspace *w)
{
    int64_t distinct = 0, at = 0;
    for (int64_t e = 0; e < w->entries; e++) {
        int64_t before = w->alike_from[e];
        while (before < e && w->row[before] != w->row[e])
            before++;
        if (before < e)
            continue; /* it was collected with the first entry of its row */
        w->distinct[distinct] = w->row[e];
        w->positions[at++] = (uint32_t)e;
        for (int64_t later = e + 1; later < w->entries && w->alike_from[later] <= e; later++)
            if (w->row[later] == w->row[e])
                w->positions[at++] = (uint32_t)later;
        w->ends[distinct++] = (uint32_t)at;
    }
    return distinct;
}

/* Learn from the event that was scored last. `error` is the derivative of the loss with respect to the score. Products are
 * rounded before they are subtracted, as autograd does: where a gradient cancels out, the confidence mask depends on the
 * sign of what is left. */
static void learn(const workspace *w, float error, const float *c)
{
    const event_model *m = w->m;
    const int64_t distinct = collect_distinct_rows(w), width = w->width;
    if (m->table.param) {
        for (int64_t e = 0; e < w->entries; e++) {
            const float weight = w->weight[e], *field = w->field + w->field_of[e] * width;
            for (int64_t i = 0; i < width; i++)
                w->table_grads[e * width + i] = weight * (error * w->sum[i] - error * field[i]);
        }
        if (m->vectors.param) {
            for (int64_t j = 0; j < m->numbers; j++)
                for (int64_t i = 0; i < width; i++)
                    w->number_grads[j * width + i] =
                        w->scaled[j] * (error * w->sum[i] - error * w->field[(m->fields + j) * width + i]);
            update_dense(w, &m->vectors, w->number_grads, c);
        }
        update_rows(w, &m->table, distinct, w->table_grads, c);
    }
    if (m->linear.param) {
        for (int64_t e = 0; e < w->entries; e++)
            w->linear_grads[e] = w->weight[e] * error;
        update_rows(w, &m->linear, distinct, w->linear_grads, c);
        if (m->slopes.param) {
            for (int64_t j = 0; j < m->numbers; j++)
                w->number_grads[j] = w->scaled[j] * error;
            update_dense(w, &m->slopes, w->number_grads, c);
        }
    }
    update_dense(w, &m->bias, &error, c);
}

/* Fetch a row of a table and of its state into the cache. */
static void prefetch_row(const event_parameter *x, int64_t row, int buffers)
{
    if (!x->param)
        return;
    const int64_t at = row * x->width * (int64_t)sizeof(float);
    for (int64_t line = 0; line < x->width * (int64_t)sizeof(float); line += 64) {
        __builtin_prefetch((const char *)x->param + at + line);
        for (int k = 0; k < buffers; k++)
            __builtin_prefetch((const char *)x->state[k] + at + line);
    }
}

/* Copy the rows and weights of event i into the workspace. */
static void load_event(const workspace *w, const event_batch *events, int64_t i)
{
    const event_model *m = w->m;
    for (int64_t e = 0; e < m->entries; e++) {
        w->row[e] = (uint32_t)events->rows[i * m->entries + e];
        w->weight[e] = events->weights ? events->weights[i * m->entries + e] : 1;
    }
}

/* Prepare the workspace of a model. Returns 0 if memory ran out. */
static int allocate(workspace *w, const event_model *m)
{
    *w = (workspace){.m = m,
                     .kernel = &cadam_instruction_set()->kernels[m->kernel],
                     .entries = m->entries + m->numbers,
                     .fields = m->fields + m->numbers,
                     .width = m->table.param ? m->table.width : 0,
                     .field_of = (const int32_t *)m->field_of,
                     .alike_from = (const int32_t *)m->alike_from};
    const int64_t entries = w->entries, fields = w->fields, width = w->width, numbers = w->m->numbers;
    const int64_t wide = width ? width : 1;
    const int64_t words = 5 * entries + numbers + fields * width + 2 * width + entries + entries * width + numbers * wide;
    uint32_t *next = w->memory = calloc((size_t)words + 1, 4);
    if (!next)
        return 0;
    w->row = next, next += entries;
    w->distinct = next, next += entries;
    w->ends = next, next += entries;
    w->positions = next, next += entries;
    w->weight = (float *)next, next += entries;
    w->scaled = (float *)next, next += numbers;
    w->field = (float *)next, next += fields * width;
    w->sum = (float *)next, next += width;
    w->squares = (float *)next, next += width;
    w->linear_grads = (float *)next, next += entries;
    w->table_grads = (float *)next, next += entries * width;
    w->number_grads = (float *)next;
    for (int64_t e = 0; e < entries; e++)
        w->weight[e] = 1;
    return 1;
}

/* Score each event and learn from it before the next one. Stops at an event whose score or label is not finite, before
 * learning from it. Returns the number of events learned from, or -2 if memory ran out. The caller has checked that all rows
 * are in range. */
EXPORT int64_t cadam_learn_per_event(const event_model *m, const event_batch *events)
{
    workspace w;
    if (!allocate(&w, m))
        return -2;
    int64_t i = 0;
    for (; i < events->n; i++) {
        if (i + EVENTS_AHEAD < events->n)
            for (int64_t e = 0; e < m->entries; e++) {
                const int64_t row = events->rows[(i + EVENTS_AHEAD) * m->entries + e];
                prefetch_row(&m->linear, row, w.kernel->buffers);
                prefetch_row(&m->table, row, w.kernel->buffers);
            }
        load_event(&w, events, i);
        const double *numbers = events->numbers + i * m->numbers;
        const float label = events->labels[i];
        normalize_numbers(&w, numbers);
        const float score = events->scores[i] = forward(&w);
        if (!isfinite(score) || !isfinite(label))
            break;
        update_samples(m, numbers);
        learn(&w, 1 / (1 + expf(-score)) - label, events->c + i * MAX_COEFFICIENTS);
    }
    free(w.memory);
    return i;
}

/* Score events without learning from them. Returns their number, or -2 if memory ran out. */
EXPORT int64_t cadam_score_events(const event_model *m, const event_batch *events)
{
    workspace w;
    if (!allocate(&w, m))
        return -2;
    for (int64_t i = 0; i < events->n; i++) {
        load_event(&w, events, i);
        normalize_numbers(&w, events->numbers + i * m->numbers);
        events->scores[i] = forward(&w);
    }
    free(w.memory);
    return events->n;
}

/* Write the normal numbers of all ranks among `known` values, by the sum of counts that rank_of takes. A logarithm takes
 * longer than all other steps from a number to its normal number. */
EXPORT void cadam_normal_numbers(int64_t known, double *normals)
{
    for (int64_t both = 0; both <= 2 * known; both++)
        normals[both] = normal_number(rank_of(both, known));
}

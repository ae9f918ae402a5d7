/* Event by event: predict an event, learn from it, go on to the next; a whole chunk of events in one call.
 *
 * The models are those of cadam.online.models that are sums over the fields of an event: a bias, a weight for each
 * place (and a slope for each number), and for a factorization machine the inner products of all pairs of the fields'
 * embeddings. The loss is the log loss of a logit. The updates are the kernels of rules.h, of rows for the two tables
 * and of dense tensors for the rest, so nothing here knows a rule.
 */
#include "cadam.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS_AHEAD = 12 };

/* A parameter of the model; p is 0 where the model has none. A dense tensor is one row. */
typedef struct {
    int64_t p, s[MAX_BUFFERS], counts, rows, width;
} part;

/* The parts of a model, and what its inputs are; all as 64-bit integers. */
typedef struct {
    part linear, table, bias, slopes, vectors;
    int64_t kernel;
    int64_t entries;    /* rows that an event names: a place each, or several for a list */
    int64_t fields;     /* of them; an embedding each */
    int64_t numbers;    /* further fields: each a number, with a bin in the tables */
    int64_t field_of;   /* int32 by entry */
    int64_t alike_from; /* int32 by entry: the first one that may name the same row */
    int64_t bin_starts; /* int64 by number: the first of its rows */
    int64_t bins;       /* bins of a number; one more row is for a missing one */
    int64_t count, mean, variance; /* of numbers: double, by number */
    double memory;      /* the count stays at this */
} model;

typedef struct {
    int64_t n;
    const int64_t *rows;    /* [n][entries] */
    const float *weights;   /* [n][entries], or null: all 1 */
    const float *numbers;   /* [n][numbers]: nan where missing */
    const float *labels;    /* [n]; nan: only predict */
    const float *c;         /* [n][MAX_COEFFICIENTS]: of each step */
    float *scores;          /* [n]: before learning */
} events;

typedef struct {
    const model *m;
    const kernel *kernel;
    int64_t entries, fields, width; /* with those of the numbers */
    uint32_t *row, *distinct, *ends, *at;
    float *weight, *scaled, *field, *sum, *squares, *linear_grads, *table_grads, *number_grads;
    const int32_t *field_of, *alike_from;
    void *memory;
} work;

static const float *embedding(const work *w, int64_t e)
{
    return (const float *)w->m->table.p + (int64_t)w->row[e] * w->width;
}

/* The rows of the numbers' bins, and the numbers as the model sees them. */
static void normalise(const work *w, const float *numbers)
{
    const model *m = w->m;
    const double *mean = (const double *)m->mean, *variance = (const double *)m->variance;
    for (int64_t j = 0; j < m->numbers; j++) {
        const int missing = isnan(numbers[j]);
        double x = 0;
        if (!missing && !(variance[j] <= 0))
            x = (asinh((double)numbers[j]) - mean[j]) / sqrt(variance[j] < 1e-12 ? 1e-12 : variance[j]);
        w->scaled[j] = (float)(x < -8 ? -8 : x > 8 ? 8 : x);
        int64_t bin = m->bins;
        if (!missing && !isnan(w->scaled[j])) { /* nan after an infinite number, and so is the score */
            bin = (int64_t)((float)m->bins * (1 / (1 + expf(-1.702f * w->scaled[j]))));
            bin = bin > m->bins - 1 ? m->bins - 1 : bin;
        }
        w->row[m->entries + j] = (uint32_t)(((const int64_t *)m->bin_starts)[j] + bin);
    }
}

/* Count the numbers of one event: Welford's update, with a count that does not grow beyond the memory. */
static void count_numbers(const model *m, const float *numbers)
{
    double *count = (double *)m->count, *mean = (double *)m->mean, *variance = (double *)m->variance;
    for (int64_t j = 0; j < m->numbers; j++) {
        if (isnan(numbers[j]))
            continue;
        const double share = 1 / (count[j] + 1), apart = asinh((double)numbers[j]) - mean[j];
        variance[j] += share * (0 - variance[j]) + share * (1 - share) * (apart * apart);
        mean[j] += share * apart;
        count[j] = count[j] + 1 < m->memory ? count[j] + 1 : m->memory;
    }
}

/* The score of the event whose rows and weights are in `w`; leaves the fields' embeddings and their sum there. */
static float forward(const work *w)
{
    const model *m = w->m;
    float score = *(const float *)m->bias.p;
    if (m->linear.p) {
        const float *linear = (const float *)m->linear.p;
        float terms = 0;
        for (int64_t e = 0; e < w->entries; e++)
            terms += w->weight[e] * linear[w->row[e]];
        score += terms;
        if (m->slopes.p)
            for (int64_t j = 0; j < m->numbers; j++)
                score += w->scaled[j] * ((const float *)m->slopes.p)[j];
    }
    if (!m->table.p)
        return score;
    const int64_t width = w->width;
    memset(w->field, 0, (size_t)(w->fields * width) * sizeof(float));
    memset(w->sum, 0, 2 * (size_t)width * sizeof(float)); /* the squares lie behind it */
    for (int64_t e = 0; e < w->entries; e++) {
        const float *v = embedding(w, e), weight = w->weight[e];
        float *into = w->field + w->field_of[e] * width;
        for (int64_t i = 0; i < width; i++)
            into[i] += weight * v[i];
    }
    for (int64_t j = 0; j < m->numbers && m->vectors.p; j++)
        for (int64_t i = 0; i < width; i++)
            w->field[(m->fields + j) * width + i] += w->scaled[j] * ((const float *)m->vectors.p)[j * width + i];
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

/* Step one parameter that is dense. */
static void step_dense(const work *w, const part *x, const float *grads, const float *c)
{
    const int64_t n = x->rows * x->width;
    void *s[MAX_BUFFERS];
    for (int k = 0; k < MAX_BUFFERS; k++)
        s[k] = (void *)x->s[k];
    const int64_t aligned = w->kernel->dense[F32]((void *)x->p, grads, s, n, c);
    if (x->counts) {
        int64_t *counts = (int64_t *)x->counts;
        counts[0] += aligned, counts[1] += n, counts[2] += n;
    }
}

/* Step the rows of a table that the event names. */
static void step_rows(const work *w, const part *x, int64_t distinct, const float *grads, const float *c)
{
    row_batch rows = {.count = distinct, .width = x->width, .distinct = w->distinct, .ends = w->ends, .at = w->at,
                      .grads = grads, .p = (void *)x->p};
    for (int k = 0; k < MAX_BUFFERS; k++)
        rows.s[k] = (void *)x->s[k];
    const int64_t aligned = w->kernel->rows[F32](&rows, c);
    if (x->counts) {
        int64_t *counts = (int64_t *)x->counts;
        counts[0] += aligned, counts[1] += distinct * x->width, counts[2] += x->rows * x->width;
    }
}

/* Put the entries of the same row together, in order of appearance. Returns how many rows there are. */
static int64_t find_distinct(const work *w)
{
    int64_t distinct = 0, at = 0;
    for (int64_t e = 0; e < w->entries; e++) {
        int64_t before = w->alike_from[e];
        while (before < e && w->row[before] != w->row[e])
            before++;
        if (before < e)
            continue; /* it is with the first of its kind */
        w->distinct[distinct] = w->row[e];
        w->at[at++] = (uint32_t)e;
        for (int64_t later = e + 1; later < w->entries && w->alike_from[later] <= e; later++)
            if (w->row[later] == w->row[e])
                w->at[at++] = (uint32_t)later;
        w->ends[distinct++] = (uint32_t)at;
    }
    return distinct;
}

/* Learn from the event that was predicted last: `error` is the derivative of the loss by the score. Products are rounded
 * before they are subtracted, as autograd does it: where nothing is left of a gradient, the mask looks at its sign. */
static void learn(const work *w, float error, const float *c)
{
    const model *m = w->m;
    const int64_t distinct = find_distinct(w), width = w->width;
    if (m->table.p) {
        for (int64_t e = 0; e < w->entries; e++) {
            const float weight = w->weight[e], *field = w->field + w->field_of[e] * width;
            for (int64_t i = 0; i < width; i++)
                w->table_grads[e * width + i] = weight * (error * w->sum[i] - error * field[i]);
        }
        if (m->vectors.p) {
            for (int64_t j = 0; j < m->numbers; j++)
                for (int64_t i = 0; i < width; i++)
                    w->number_grads[j * width + i] =
                        w->scaled[j] * (error * w->sum[i] - error * w->field[(m->fields + j) * width + i]);
            step_dense(w, &m->vectors, w->number_grads, c);
        }
        step_rows(w, &m->table, distinct, w->table_grads, c);
    }
    if (m->linear.p) {
        for (int64_t e = 0; e < w->entries; e++)
            w->linear_grads[e] = w->weight[e] * error;
        step_rows(w, &m->linear, distinct, w->linear_grads, c);
        if (m->slopes.p) {
            for (int64_t j = 0; j < m->numbers; j++)
                w->number_grads[j] = w->scaled[j] * error;
            step_dense(w, &m->slopes, w->number_grads, c);
        }
    }
    step_dense(w, &m->bias, &error, c);
}

static void fetch(const part *x, int64_t row, int buffers)
{
    if (!x->p)
        return;
    const int64_t at = row * x->width * (int64_t)sizeof(float);
    for (int64_t line = 0; line < x->width * (int64_t)sizeof(float); line += 64) {
        __builtin_prefetch((const char *)x->p + at + line);
        for (int k = 0; k < buffers; k++)
            __builtin_prefetch((const char *)x->s[k] + at + line);
    }
}

static void take_event(const work *w, const events *given, int64_t i)
{
    const model *m = w->m;
    for (int64_t e = 0; e < m->entries; e++) {
        w->row[e] = (uint32_t)given->rows[i * m->entries + e];
        w->weight[e] = given->weights ? given->weights[i * m->entries + e] : 1;
    }
}

static int make_room(work *w)
{
    const int64_t entries = w->entries, fields = w->fields, width = w->width, numbers = w->m->numbers;
    const int64_t wide = width ? width : 1;
    const int64_t words = 5 * entries + numbers + fields * width + 2 * width + entries + entries * width + numbers * wide;
    uint32_t *room = w->memory = calloc((size_t)words + 1, 4);
    if (!room)
        return 0;
    w->row = room, room += entries;
    w->distinct = room, room += entries;
    w->ends = room, room += entries;
    w->at = room, room += entries;
    w->weight = (float *)room, room += entries;
    w->scaled = (float *)room, room += numbers;
    w->field = (float *)room, room += fields * width;
    w->sum = (float *)room, room += width;
    w->squares = (float *)room, room += width;
    w->linear_grads = (float *)room, room += entries;
    w->table_grads = (float *)room, room += entries * width;
    w->number_grads = (float *)room;
    for (int64_t e = 0; e < entries; e++)
        w->weight[e] = 1;
    return 1;
}

/* Predict each event and learn from it before the next. Stops at an event whose score or label is not finite, before
 * learning from it. Returns how many were learnt from, -2 if memory ran out. Rows must be in range. */
EXPORT int64_t cadam_learn_per_event(const model *m, const events *given)
{
    work w = {.m = m,
              .kernel = &cadam_instruction_set()->kernels[m->kernel],
              .entries = m->entries + m->numbers,
              .fields = m->fields + m->numbers,
              .width = m->table.p ? m->table.width : 0,
              .field_of = (const int32_t *)m->field_of,
              .alike_from = (const int32_t *)m->alike_from};
    if (!make_room(&w))
        return -2;
    int64_t i = 0;
    for (; i < given->n; i++) {
        if (i + EVENTS_AHEAD < given->n)
            for (int64_t e = 0; e < m->entries; e++) {
                const int64_t row = given->rows[(i + EVENTS_AHEAD) * m->entries + e];
                fetch(&m->linear, row, w.kernel->buffers);
                fetch(&m->table, row, w.kernel->buffers);
            }
        take_event(&w, given, i);
        const float *numbers = given->numbers + i * m->numbers, label = given->labels[i];
        if (m->numbers)
            normalise(&w, numbers);
        float score = given->scores[i] = forward(&w);
        if (!isfinite(score) || !isfinite(label))
            break;
        if (m->numbers) {
            count_numbers(m, numbers);
            normalise(&w, numbers);
            score = forward(&w);
        }
        learn(&w, 1 / (1 + expf(-score)) - label, given->c + i * MAX_COEFFICIENTS);
    }
    free(w.memory);
    return i;
}

/* Predict events and learn from none. Returns their number, -2 if memory ran out. */
EXPORT int64_t cadam_score_events(const model *m, const events *given)
{
    work w = {.m = m,
              .kernel = &cadam_instruction_set()->kernels[m->kernel],
              .entries = m->entries + m->numbers,
              .fields = m->fields + m->numbers,
              .width = m->table.p ? m->table.width : 0,
              .field_of = (const int32_t *)m->field_of};
    if (!make_room(&w))
        return -2;
    for (int64_t i = 0; i < given->n; i++) {
        take_event(&w, given, i);
        if (m->numbers)
            normalise(&w, given->numbers + i * m->numbers);
        given->scores[i] = forward(&w);
    }
    free(w.memory);
    return given->n;
}

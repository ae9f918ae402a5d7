/* Kernels for sparse gradients: sum the gradients of each row of an embedding table, then update the row. The rows of a
 * table lie far apart, so they and their gradients are prefetched some rows ahead. */

#define DECLARE_ROW(k) real_t *restrict s##k = (real_t *)rows->s[k] + row * width;
#define PREFETCH_ROW(k) prefetch_row(rows->s[k], next, width * (int64_t)sizeof(real_t));

/* Sum the elements i to i + m of a row's gradients in order of appearance, in a vector that stays in registers. */
#define SUM(T, real_, m)                                                                                               \
    typedef real_ vector __attribute__((vector_size(m * sizeof(real_))));                                              \
    real_t total[m], buffer[m];                                                                                        \
    vector sum, more;                                                                                                  \
    memcpy(&sum, widen_##T(grads + rows->positions[begin] * width + i, buffer, m), sizeof sum);                        \
    for (int64_t e = begin + 1; e < end; e++) {                                                                        \
        if (i == 0 && e + GRADS_AHEAD < last)                                                                          \
            prefetch_row(grads, rows->positions[e + GRADS_AHEAD], width * (int64_t)sizeof *grads);                     \
        memcpy(&more, widen_##T(grads + rows->positions[e] * width + i, buffer, m), sizeof more);                      \
        sum += more;                                                                                                   \
    }                                                                                                                  \
    memcpy(total, &sum, sizeof sum);

#define SUM_AND_UPDATE(rule, n_buffers, P, G, real_, m)                                                                \
    {                                                                                                                  \
        SUM(G, real_, m)                                                                                               \
        UPDATE(rule, n_buffers, P, real_, total, m)                                                                    \
        i += m;                                                                                                        \
    }

/* Process a row in strips of fixed sizes, which the compiler turns into vector code. A row is too short for a loop over an
 * unknown number of elements to pay off. */
#define STRIPS(DO, ...)                                                                                                \
    while (i + 16 <= width)                                                                                            \
        DO(__VA_ARGS__, 16)                                                                                            \
    if (width & 8)                                                                                                     \
        DO(__VA_ARGS__, 8)                                                                                             \
    if (width & 4)                                                                                                     \
        DO(__VA_ARGS__, 4)                                                                                             \
    if (width & 2)                                                                                                     \
        DO(__VA_ARGS__, 2)                                                                                             \
    if (width & 1)                                                                                                     \
        DO(__VA_ARGS__, 1)

/* Where each row counts its own steps: advance the count of a row and return the coefficients of that step. */
static inline const void *advance_row_step(const row_batch *rows, const void *c, int64_t row)
{
    const int32_t count = ++rows->steps[row];
    return (const char *)c + rows->set_of[count < rows->last_count ? count : rows->last_count] * rows->set_size;
}

/* For exact updates: set the step of a row's last update to this one. Returns the number of steps that the row missed, at
 * most as many as there are coefficients for. */
static inline int64_t advance_last_step(const row_batch *rows, int64_t row)
{
    const int32_t missed = rows->now - 1 - rows->steps[row];
    rows->steps[row] = rows->now;
    return missed < rows->max_missed ? missed : rows->max_missed;
}

/* Load the coefficients of a row into `values`, where they depend on the row. */
#define BY_COUNT(rule, real_)                                                                                          \
    if (rows->steps)                                                                                                   \
        values = *(const struct rule##_##real_##_c *)advance_row_step(rows, c_, row);

/* For exact updates: replace the aging coefficients, which are the last ones, by those for the steps that the row missed. */
#define SET_AGING(rule, real_, values)                                                                                 \
    const int64_t missed = advance_last_step(rows, row);                                                               \
    memcpy((real_ *)(&values + 1) - rule##_AGING, (const real_ *)rows->aging + missed * rule##_AGING,                  \
           rule##_AGING * sizeof(real_));
#define BY_MISSED_STEPS(rule, real_) SET_AGING(rule, real_, values)

/* A kernel for tables of type P with gradients of type G. ADVANCE is BY_COUNT or BY_MISSED_STEPS. */
#define ROWS(rule, n_buffers, P, G, real_, integer_, NAME, ADVANCE)                                                    \
    static int64_t NAME(const row_batch *rows, const void *c_)                                                         \
    {                                                                                                                  \
        typedef real_ real_t;                                                                                          \
        typedef integer_ integer_t;                                                                                    \
        struct rule##_##real_##_c values = *(const struct rule##_##real_##_c *)c_;                                     \
        const struct rule##_##real_##_c *c = &values;                                                                  \
        const value_##G *grads = rows->grads;                                                                          \
        const int64_t width = rows->width, last = rows->count ? rows->ends[rows->count - 1] : 0;                       \
        int64_t aligned = 0, begin = 0;                                                                                \
        for (int64_t e = 0; e < GRADS_AHEAD && e < last; e++)                                                          \
            prefetch_row(grads, rows->positions[e], width * (int64_t)sizeof *grads);                                   \
        for (int64_t r = -ROWS_AHEAD; r < rows->count; r++) {                                                          \
            if (r + ROWS_AHEAD < rows->count) {                                                                        \
                const int64_t next = rows->distinct[r + ROWS_AHEAD];                                                   \
                prefetch_row(rows->p, next, width * (int64_t)sizeof(value_##P));                                       \
                BUFFERS_##n_buffers(PREFETCH_ROW)                                                                      \
                if (rows->steps)                                                                                       \
                    prefetch_row(rows->steps, next, sizeof *rows->steps);                                              \
            }                                                                                                          \
            if (r < 0)                                                                                                 \
                continue;                                                                                              \
            const int64_t row = rows->distinct[r], end = rows->ends[r];                                                \
            if (begin + GRADS_AHEAD < last)                                                                            \
                prefetch_row(grads, rows->positions[begin + GRADS_AHEAD], width * (int64_t)sizeof *grads);             \
            ADVANCE(rule, real_)                                                                                       \
            value_##P *restrict p = (value_##P *)rows->p + row * width;                                                \
            BUFFERS_##n_buffers(DECLARE_ROW)                                                                           \
            int64_t i = 0;                                                                                             \
            STRIPS(SUM_AND_UPDATE, rule, n_buffers, P, G, real_)                                                       \
            begin = end;                                                                                               \
        }                                                                                                              \
        return aligned;                                                                                                \
    }

#define ALL_ROWS(rule, buffers, ADVANCE)                                                                               \
    ROWS(rule, buffers, F32, F32, float, int32_t, rule##_f32_rows, ADVANCE)                                            \
    ROWS(rule, buffers, F64, F64, double, int64_t, rule##_f64_rows, ADVANCE)                                           \
    ROWS(rule, buffers, BF16, BF16, float, int32_t, rule##_bf16_rows, ADVANCE)                                         \
    ROWS(rule, buffers, BF16, F32, float, int32_t, rule##_bf16_float_grads, ADVANCE)                                   \
    ROWS(rule, buffers, F16, F16, float, int32_t, rule##_f16_rows, ADVANCE)                                            \
    ROWS(rule, buffers, F16, F32, float, int32_t, rule##_f16_float_grads, ADVANCE)
#define LAZY_ROWS(rule, buffers, ...) ALL_ROWS(rule, buffers, BY_COUNT)
#define EXACT_ROWS(rule, buffers, n_coefficients, n_aging, ...)                                                        \
    enum { rule##_AGING = n_aging };                                                                                   \
    ALL_ROWS(rule, buffers, BY_MISSED_STEPS)
RULES(LAZY_ROWS)
AGING_RULES(EXACT_ROWS)

/* The squared norm of a sparse gradient. Squares are added up in 16 lanes, so that every instruction set adds them in the
 * same order. */
#define SUM_AND_SQUARE(T, real_, m)                                                                                    \
    {                                                                                                                  \
        SUM(T, real_, m)                                                                                               \
        for (int k = 0; k < m; k++)                                                                                    \
            lanes[k] += (double)total[k] * (double)total[k];                                                           \
        i += m;                                                                                                        \
    }

#define SQUARES(T, real_, NAME)                                                                                        \
    static double NAME(const row_batch *rows)                                                                          \
    {                                                                                                                  \
        typedef real_ real_t;                                                                                          \
        const value_##T *grads = rows->grads;                                                                          \
        const int64_t width = rows->width, last = rows->count ? rows->ends[rows->count - 1] : 0;                       \
        double lanes[16] = {0}, squares = 0;                                                                           \
        int64_t begin = 0;                                                                                             \
        for (int64_t e = 0; e < GRADS_AHEAD && e < last; e++)                                                          \
            prefetch_row(grads, rows->positions[e], width * (int64_t)sizeof *grads);                                   \
        for (int64_t r = 0; r < rows->count; r++) {                                                                    \
            const int64_t end = rows->ends[r];                                                                         \
            if (begin + GRADS_AHEAD < last)                                                                            \
                prefetch_row(grads, rows->positions[begin + GRADS_AHEAD], width * (int64_t)sizeof *grads);             \
            int64_t i = 0;                                                                                             \
            STRIPS(SUM_AND_SQUARE, T, real_)                                                                           \
            begin = end;                                                                                               \
        }                                                                                                              \
        for (int k = 0; k < 16; k++)                                                                                   \
            squares += lanes[k];                                                                                       \
        return squares;                                                                                                \
    }
SQUARES(F32, float, squared_norm_f32)
SQUARES(F64, double, squared_norm_f64)
SQUARES(BF16, float, squared_norm_bf16)
SQUARES(F16, float, squared_norm_f16)

/* The loops around the element functions of rules.h, compiled once for every instruction set.
 *
 * A loop runs over blocks of a fixed size, which the compiler turns into vector code, and prefetches all its
 * streams some blocks ahead: the hardware's own prefetcher does not keep up with this many.
 */
#include "cadam.h"

#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

enum { BLOCK = 64, AHEAD = 512, ROWS_AHEAD = 16, GRADS_AHEAD = 48 };

static inline void prefetch(const void *p, int64_t i, int64_t size)
{
    const char *at = (const char *)p + (i + AHEAD) * size;
    for (int64_t line = 0; line < BLOCK * size; line += 64)
        __builtin_prefetch(at + line);
}

/* Into the second cache: more can be on its way there than to the first. */
static inline void prefetch_row(const void *first, int64_t row, int64_t bytes)
{
    const uintptr_t begin = (uintptr_t)first + (uintptr_t)(row * bytes), end = begin + (uintptr_t)bytes;
    for (uintptr_t line = begin & ~(uintptr_t)63; line < end; line += 64)
        __builtin_prefetch((const void *)line, 0, 2);
}

/* Up to a block of values as the arithmetic wants them, and back. float and double are used where they lie. */
typedef float value_F32;
typedef double value_F64;
typedef uint16_t value_BF16;
typedef uint16_t value_F16;

static inline float *open_F32(const float *p, float *room, int64_t n) { return (void)room, (void)n, (float *)p; }
static inline void close_F32(float *p, const float *x, int64_t n) { (void)p, (void)x, (void)n; }
static inline double *open_F64(const double *p, double *room, int64_t n) { return (void)room, (void)n, (double *)p; }
static inline void close_F64(double *p, const double *x, int64_t n) { (void)p, (void)x, (void)n; }

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float *open_BF16(const uint16_t *p, float *room, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        room[i] = from_bits((uint32_t)p[i] << 16);
    return room;
}

static inline void close_BF16(uint16_t *p, const float *x, int64_t n) /* to nearest, ties to even; a NaN stays one */
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = to_bits(x[i]);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        p[i] = (uint16_t)(x[i] != x[i] ? 0x7fc0u : rounded);
    }
}

static inline float float_of_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    const uint32_t small = to_bits((float)rest * 0x1p-24f); /* below the normal numbers: a multiple of the smallest */
    const uint32_t normal = (rest << 13) + (112u << 23), large = (rest << 13) | 0x7f800000u;
    const uint32_t quiet = rest > 0x7c00 ? 0x00400000u : 0;
    return from_bits(sign | (rest < 0x0400 ? small : rest >= 0x7c00 ? large | quiet : normal));
}

static inline uint16_t half_of_float(float x) /* to nearest, ties to even; a NaN stays one */
{
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    const uint32_t small = to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f); /* 0.5f ends where halves do */
    const uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t nan = 0x7e00 | (rest >> 13 & 0x3ff);
    const uint32_t finite = rest < 0x38800000 ? small : normal;
    return (uint16_t)(sign | (rest > 0x7f800000 ? nan : rest >= 0x477ff000 ? 0x7c00u : finite));
}

static inline float *open_F16(const uint16_t *p, float *room, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(room + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))));
#endif
    for (; i < n; i++)
        room[i] = float_of_half(p[i]);
    return room;
}

static inline void close_F16(uint16_t *p, const float *x, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        p[i] = half_of_float(x[i]);
}

/* What the element functions are written in. */
#define MAXIMUM(x, y) ((x) > (y) ? (x) : (x) != (x) ? (x) : (y)) /* a NaN stays one */
#define SIGN(x) ((x) > 0 ? (real)1 : (x) < 0 ? (real)-1 : (real)0)
#define SCALED(x, factor) ((factor) == 0 ? (real)0 : (x) * (factor))
#define HOLD(alignment, step) ((alignment) <= c->threshold ? (real)0 : (step))

#define real float
#define SQRT(x) __builtin_sqrtf(x)
#define ELEMENT(name) name##_float
#define COEFFICIENTS(name) name##_float_c
#include "rules.h"
#undef COEFFICIENTS
#undef ELEMENT
#undef SQRT
#undef real

#define real double
#define SQRT(x) __builtin_sqrt(x)
#define ELEMENT(name) name##_double
#define COEFFICIENTS(name) name##_double_c
#include "rules.h"
#undef COEFFICIENTS
#undef ELEMENT
#undef SQRT
#undef real

/* The buffers by number, so that the compiler sees them as separate streams. */
#define BUFFERS_0(F)
#define BUFFERS_1(F) F(0)
#define BUFFERS_2(F) F(0) F(1)
#define BUFFERS_3(F) F(0) F(1) F(2)
#define BUFFERS_4(F) F(0) F(1) F(2) F(3)

#define DECLARE(k) real_t *restrict s##k = s_[k];
#define ARGUMENT(k) , &s##k[i + j]
#define PREFETCH(k) prefetch(s##k, i, sizeof(real_t));

/* Update the elements i to i + m, m at most BLOCK, with these gradients. */
#define UPDATE(rule, n_buffers, P, real_, grads, m)                                                                \
    {                                                                                                              \
        real_t p_room[BLOCK];                                                                                      \
        real_t *restrict x = open_##P(p + i, p_room, m);                                                           \
        const real_t *restrict y = grads;                                                                          \
        integer_t count = 0;                                                                                       \
        _Pragma("GCC ivdep") for (int64_t j = 0; j < m; j++)                                                       \
        {                                                                                                          \
            real_t alignment;                                                                                      \
            rule##_##real_(c, &x[j], y[j] BUFFERS_##n_buffers(ARGUMENT), &alignment);                              \
            count += alignment > 0;                                                                                \
        }                                                                                                          \
        close_##P(p + i, x, m);                                                                                    \
        aligned += count;                                                                                          \
    }

#define LOOP(rule, n_buffers, P, G, real_, integer_, NAME)                                                         \
    static int64_t NAME(void *p_, const void *g_, void *const *s_, int64_t n, const void *c_)                      \
    {                                                                                                              \
        typedef real_ real_t;                                                                                      \
        typedef integer_ integer_t;                                                                                \
        value_##P *restrict p = p_;                                                                                \
        const value_##G *restrict g = g_;                                                                          \
        BUFFERS_##n_buffers(DECLARE)                                                                               \
        const struct rule##_##real_##_c values = *(const struct rule##_##real_##_c *)c_, *c = &values;             \
        real_t room[BLOCK];                                                                                        \
        int64_t aligned = 0, i = 0;                                                                                \
        (void)s_, (void)room;                                                                                      \
        for (; i + BLOCK <= n; i += BLOCK) {                                                                       \
            prefetch(p, i, sizeof *p);                                                                             \
            prefetch(g, i, sizeof *g);                                                                             \
            BUFFERS_##n_buffers(PREFETCH)                                                                          \
            UPDATE(rule, n_buffers, P, real_, open_##G(g + i, room, BLOCK), BLOCK)                                 \
        }                                                                                                          \
        if (i < n)                                                                                                 \
            UPDATE(rule, n_buffers, P, real_, open_##G(g + i, room, n - i), n - i)                                 \
        return aligned;                                                                                            \
    }

#define LOOPS(rule, buffers, coefficients)                                                                         \
    LOOP(rule, buffers, F32, F32, float, int32_t, rule##_f32)                                                      \
    LOOP(rule, buffers, F64, F64, double, int64_t, rule##_f64)                                                     \
    LOOP(rule, buffers, BF16, BF16, float, int32_t, rule##_bf16)                                                   \
    LOOP(rule, buffers, F16, F16, float, int32_t, rule##_f16)
RULES(LOOPS)

/* The traffic of an Adam step and next to no arithmetic: the speed limit that benchmarks measure against. */
struct traffic_float_c {
    float unused;
};

static inline void traffic_float(const struct traffic_float_c *c, float *p, float g, float *m, float *v, float *aligned)
{
    (void)c;
    *p += g, *m += g, *v += g, *aligned = 0;
}
LOOP(traffic, 2, F32, F32, float, int32_t, traffic_f32)

#define DECLARE_ROW(k) real_t *restrict s##k = (real_t *)rows->s[k] + row * width;
#define PREFETCH_ROW(k) prefetch_row(rows->s[k], next, width * (int64_t)sizeof(real_t));

/* Sum the elements i to i + m of a row's gradients in order of appearance, as a vector that stays in registers. */
#define SUM(T, real_, m)                                                                                           \
    typedef real_ vector __attribute__((vector_size(m * sizeof(real_))));                                          \
    real_t total[m], room[m];                                                                                      \
    vector sum, more;                                                                                              \
    memcpy(&sum, open_##T(grads + rows->at[begin] * width + i, room, m), sizeof sum);                              \
    for (int64_t e = begin + 1; e < end; e++) {                                                                    \
        if (i == 0 && e + GRADS_AHEAD < last)                                                                      \
            prefetch_row(grads, rows->at[e + GRADS_AHEAD], width * (int64_t)sizeof *grads);                        \
        memcpy(&more, open_##T(grads + rows->at[e] * width + i, room, m), sizeof more);                            \
        sum += more;                                                                                               \
    }                                                                                                              \
    memcpy(total, &sum, sizeof sum);

#define SUM_AND_UPDATE(rule, n_buffers, T, real_, m)                                                               \
    {                                                                                                              \
        SUM(T, real_, m)                                                                                           \
        UPDATE(rule, n_buffers, T, real_, total, m)                                                                \
        i += m;                                                                                                    \
    }

/* A row as strips of fixed sizes, which the compiler turns into vector code: a row is too short for a loop that finds out
 * how long it is. */
#define STRIPS(DO, ...)                                                                                            \
    while (i + 16 <= width)                                                                                        \
        DO(__VA_ARGS__, 16)                                                                                        \
    if (width & 8)                                                                                                 \
        DO(__VA_ARGS__, 8)                                                                                         \
    if (width & 4)                                                                                                 \
        DO(__VA_ARGS__, 4)                                                                                         \
    if (width & 2)                                                                                                 \
        DO(__VA_ARGS__, 2)                                                                                         \
    if (width & 1)                                                                                                 \
        DO(__VA_ARGS__, 1)

/* Rows lie far apart, so they and their gradients are fetched some rows ahead. */
#define ROWS(rule, n_buffers, T, real_, integer_, NAME)                                                            \
    static int64_t NAME(const row_batch *rows, const void *c_)                                                     \
    {                                                                                                              \
        typedef real_ real_t;                                                                                      \
        typedef integer_ integer_t;                                                                                \
        const struct rule##_##real_##_c values = *(const struct rule##_##real_##_c *)c_, *c = &values;             \
        const value_##T *grads = rows->grads;                                                                      \
        const int64_t width = rows->width, last = rows->count ? rows->ends[rows->count - 1] : 0;                   \
        int64_t aligned = 0, begin = 0;                                                                            \
        for (int64_t e = 0; e < GRADS_AHEAD && e < last; e++)                                                      \
            prefetch_row(grads, rows->at[e], width * (int64_t)sizeof *grads);                                      \
        for (int64_t r = -ROWS_AHEAD; r < rows->count; r++) {                                                      \
            if (r + ROWS_AHEAD < rows->count) {                                                                    \
                const int64_t next = rows->distinct[r + ROWS_AHEAD];                                               \
                prefetch_row(rows->p, next, width * (int64_t)sizeof(value_##T));                                   \
                BUFFERS_##n_buffers(PREFETCH_ROW)                                                                  \
            }                                                                                                      \
            if (r < 0)                                                                                             \
                continue;                                                                                          \
            const int64_t row = rows->distinct[r], end = rows->ends[r];                                            \
            if (begin + GRADS_AHEAD < last)                                                                        \
                prefetch_row(grads, rows->at[begin + GRADS_AHEAD], width * (int64_t)sizeof *grads);                \
            value_##T *restrict p = (value_##T *)rows->p + row * width;                                            \
            BUFFERS_##n_buffers(DECLARE_ROW)                                                                       \
            int64_t i = 0;                                                                                         \
            STRIPS(SUM_AND_UPDATE, rule, n_buffers, T, real_)                                                      \
            begin = end;                                                                                           \
        }                                                                                                          \
        return aligned;                                                                                            \
    }

#define ALL_ROWS(rule, buffers, coefficients)                                                                      \
    ROWS(rule, buffers, F32, float, int32_t, rule##_f32_rows)                                                      \
    ROWS(rule, buffers, F64, double, int64_t, rule##_f64_rows)                                                     \
    ROWS(rule, buffers, BF16, float, int32_t, rule##_bf16_rows)                                                    \
    ROWS(rule, buffers, F16, float, int32_t, rule##_f16_rows)
RULES(ALL_ROWS)

/* The squares of the sums of all rows, added up in lanes, so that every instruction set adds in the same order. */
#define SUM_AND_SQUARE(T, real_, m)                                                                                \
    {                                                                                                              \
        SUM(T, real_, m)                                                                                           \
        for (int k = 0; k < m; k++)                                                                                \
            lanes[k] += (double)total[k] * (double)total[k];                                                       \
        i += m;                                                                                                    \
    }

#define SQUARES(T, real_, NAME)                                                                                    \
    static double NAME(const row_batch *rows)                                                                      \
    {                                                                                                              \
        typedef real_ real_t;                                                                                      \
        const value_##T *grads = rows->grads;                                                                      \
        const int64_t width = rows->width, last = rows->count ? rows->ends[rows->count - 1] : 0;                   \
        double lanes[16] = {0}, squares = 0;                                                                       \
        int64_t begin = 0;                                                                                         \
        for (int64_t e = 0; e < GRADS_AHEAD && e < last; e++)                                                      \
            prefetch_row(grads, rows->at[e], width * (int64_t)sizeof *grads);                                      \
        for (int64_t r = 0; r < rows->count; r++) {                                                                \
            const int64_t end = rows->ends[r];                                                                     \
            if (begin + GRADS_AHEAD < last)                                                                        \
                prefetch_row(grads, rows->at[begin + GRADS_AHEAD], width * (int64_t)sizeof *grads);                \
            int64_t i = 0;                                                                                         \
            STRIPS(SUM_AND_SQUARE, T, real_)                                                                       \
            begin = end;                                                                                           \
        }                                                                                                          \
        for (int k = 0; k < 16; k++)                                                                               \
            squares += lanes[k];                                                                                   \
        return squares;                                                                                            \
    }
SQUARES(F32, float, squares_f32)
SQUARES(F64, double, squares_f64)
SQUARES(BF16, float, squares_bf16)
SQUARES(F16, float, squares_f16)

#define ENTRY(rule, n_buffers, n_coefficients)                                                                     \
    {                                                                                                              \
        .name = #rule, .buffers = n_buffers, .coefficients = n_coefficients,                                       \
        .dense = {rule##_f32, rule##_f64, rule##_bf16, rule##_f16},                                                \
        .rows = {rule##_f32_rows, rule##_f64_rows, rule##_bf16_rows, rule##_f16_rows},                             \
    },
static const kernel kernels[] = {RULES(ENTRY)};

const instruction_set JOIN(cadam_, INSTRUCTIONS) = {
    .kernels = kernels,
    .count = sizeof kernels / sizeof *kernels,
    .squares = {squares_f32, squares_f64, squares_bf16, squares_f16},
    .traffic = traffic_f32,
};

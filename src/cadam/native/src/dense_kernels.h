/* Kernels for dense tensors: the loop over the elements around the element functions of rules.h.
 *
 * A loop runs over blocks of a fixed size, which the compiler turns into vector code, and prefetches the parameter, the
 * gradient and all buffers some blocks ahead: the hardware prefetcher does not keep up with that many streams. */

/* Apply F to the number of each buffer. The buffers become separate variables, so that the compiler can treat them as
 * separate streams. */
#define BUFFERS_0(F)
#define BUFFERS_1(F) F(0)
#define BUFFERS_2(F) F(0) F(1)
#define BUFFERS_3(F) F(0) F(1) F(2)
#define BUFFERS_4(F) F(0) F(1) F(2) F(3)

#define DECLARE(k) real_t *restrict s##k = s_[k];
#define ARGUMENT(k) , &s##k[i + j]
#define PREFETCH(k) prefetch(s##k, i, sizeof(real_t));


/* Update the elements i to i + m, where m is at most BLOCK, with the gradients `grads`. */
#define UPDATE(rule, n_buffers, P, real_, grads, m)                                                                    \
    {                                                                                                                  \
        real_t p_buffer[BLOCK];                                                                                        \
        real_t *restrict x = widen_##P(p + i, p_buffer, m);                                                            \
        const real_t *restrict y = grads;                                                                              \
        integer_t count = 0;                                                                                           \
        _Pragma("GCC ivdep") for (int64_t j = 0; j < m; j++)                                                           \
        {                                                                                                              \
            real_t alignment;                                                                                          \
            rule##_##real_(c, &x[j], y[j] BUFFERS_##n_buffers(ARGUMENT), &alignment);                           \
            count += alignment > 0;                                                                                    \
        }                                                                                                              \
        narrow_##P(p + i, x, m);                                                                                       \
        aligned += count;                                                                                              \
    }

/* A kernel for parameters of type P with gradients of type G. */
#define LOOP(rule, n_buffers, P, G, real_, integer_, NAME)                                                             \
    static int64_t NAME(void *p_, const void *g_, void *const *s_, int64_t n, const void *c_)                          \
    {                                                                                                                  \
        typedef real_ real_t;                                                                                          \
        typedef integer_ integer_t;                                                                                    \
        value_##P *restrict p = p_;                                                                                    \
        const value_##G *restrict g = g_;                                                                              \
        BUFFERS_##n_buffers(DECLARE)                                                                                   \
        const struct rule##_##real_##_c values = *(const struct rule##_##real_##_c *)c_, *c = &values;                 \
        real_t buffer[BLOCK];                                                                                          \
        int64_t aligned = 0, i = 0;                                                                                    \
        (void)s_, (void)buffer;                                                                                        \
        for (; i + BLOCK <= n; i += BLOCK) {                                                                           \
            prefetch(p, i, sizeof *p);                                                                                 \
            prefetch(g, i, sizeof *g);                                                                                 \
            BUFFERS_##n_buffers(PREFETCH)                                                                              \
            UPDATE(rule, n_buffers, P, real_, widen_##G(g + i, buffer, BLOCK), BLOCK)                                  \
        }                                                                                                              \
        if (i < n)                                                                                                     \
            UPDATE(rule, n_buffers, P, real_, widen_##G(g + i, buffer, n - i), n - i)                                  \
        return aligned;                                                                                                \
    }

#define LOOPS(rule, buffers, ...)                                                                                      \
    LOOP(rule, buffers, F32, F32, float, int32_t, rule##_f32)                                                          \
    LOOP(rule, buffers, F64, F64, double, int64_t, rule##_f64)                                                         \
    LOOP(rule, buffers, BF16, BF16, float, int32_t, rule##_bf16)                                                       \
    LOOP(rule, buffers, F16, F16, float, int32_t, rule##_f16)
RULES(LOOPS)

/* A rule that reads and writes the memory of an Adam step with hardly any arithmetic: the speed limit that benchmarks
 * compare with. */
struct traffic_float_c {
    float unused;
};

static inline void traffic_float(const struct traffic_float_c *c, float *p, float g, float *m, float *v, float *aligned)
{
    (void)c;
    *p += g, *m += g, *v += g, *aligned = 0;
}
LOOP(traffic, 2, F32, F32, float, int32_t, traffic_f32)

/* Kernels for quantized moments, and for second moments that a whole row shares.
 *
 * A kernel processes blocks of elements that share their scales: QUANTIZATION_BLOCK elements of a dense tensor, or one row
 * of a table. What is done to a buffer depends on how it is stored: F32, BF16, INT8, or ROW for one float32 number for each
 * row. Each of the following operations exists once for each storage, as OPERATION_STORAGE:
 *   PREPARE      declares what the buffer needs for a block;
 *   DECODE       reads the moments of a pair of vectors as floats;
 *   ENCODE       writes them back, or for INT8 keeps them rounded until the scale is known;
 *   FINISH       computes the new scale;
 *   LATER        is not empty if WRITE_LATER has something to do;
 *   WRITE_LATER  writes what ENCODE has kept.
 * EACH_n applies an operation to n buffers. The arguments of each are its number, its storage, the kind of moment (signed or
 * positive) and its number among the quantized buffers, which selects its noise. */
#define EACH_1(DO, how, kind, which) DO(0, how, kind, which)
#define EACH_2(DO, how, kind, which, ...) DO(0, how, kind, which) LAST_1(DO, 1, __VA_ARGS__)
#define EACH_3(DO, how, kind, which, ...) DO(0, how, kind, which) LAST_2(DO, 1, 2, __VA_ARGS__)
#define EACH_4(DO, how, kind, which, ...) DO(0, how, kind, which) LAST_3(DO, 1, 2, 3, __VA_ARGS__)
#define LAST_1(DO, k, how, kind, which) DO(k, how, kind, which)
#define LAST_2(DO, k, l, how, kind, which, ...) DO(k, how, kind, which) LAST_1(DO, l, __VA_ARGS__)
#define LAST_3(DO, k, l, m, how, kind, which, ...) DO(k, how, kind, which) LAST_2(DO, l, m, __VA_ARGS__)

#define PREPARE(k, how, kind, which) PREPARE_##how(k, kind)
#define DECODE(k, how, kind, which) DECODE_##how(k, kind)
#define ENCODE(k, how, kind, which) ENCODE_##how(k, kind, which)
#define FINISH(k, how, kind, which) FINISH_##how(k, kind)
#define LATER(k, how, kind, which) LATER_##how
#define WRITE_LATER(k, how, kind, which) WRITE_LATER_##how(k, kind)
#define FETCH(k, how, kind, which) prefetch(s[k], i + j, sizeof(stored_##how));
#define FETCH_ROW(k, how, kind, which)                                                                                 \
    prefetch_row(rows->s[k], next, SPAN_##how);                                                                        \
    if (sizeof(stored_##how) == 1)                                                                                     \
        __builtin_prefetch(rows->scales[k] + next, 0, 2);

#define FIRST_OF(k) , &x##k.a
#define SECOND_OF(k) , &x##k.b
#define ELEMENTS(k, how) (stored_##how *)s[k] + i + j

typedef float stored_F32;
#define SPAN_F32 width * 4
#define PREPARE_F32(k, kind)
#define DECODE_F32(k, kind) pair_t x##k = read_pair(ELEMENTS(k, F32), left);
#define ENCODE_F32(k, kind, which) write_pair(ELEMENTS(k, F32), x##k, left);
#define FINISH_F32(k, kind)
#define LATER_F32
#define WRITE_LATER_F32(k, kind)

typedef uint16_t stored_BF16;
#define SPAN_BF16 width * 2
#define PREPARE_BF16(k, kind)
#define DECODE_BF16(k, kind) pair_t x##k = from_upper_halves(read_words(ELEMENTS(k, BF16), left));
#define ENCODE_BF16(k, kind, which) write_words(ELEMENTS(k, BF16), to_bfloat16(x##k, noise##which), left);
#define FINISH_BF16(k, kind)
#define LATER_BF16
#define WRITE_LATER_BF16(k, kind)

typedef uint8_t stored_INT8;
#define SPAN_INT8 width
#define PREPARE_INT8(k, kind)                                                                                          \
    words_t rounded##k[MAX_QUANTIZED_WIDTH / PAIR], sizes##k = {0};                                                    \
    const uint32_t old##k = scales[k][scale_index];                                                                    \
    const uint16_t base##k = (uint16_t)((old##k - 31) << 7);                                                           \
    const int has_nan##k = may_have_nan((uint8_t *)s[k] + i, m, SIGN_##kind);
#define DECODE_INT8(k, kind)                                                                                           \
    pair_t x##k = from_upper_halves(dequantize_##kind(read_bytes(ELEMENTS(k, INT8), left), base##k, has_nan##k));
#define ENCODE_INT8(k, kind, which) rounded##k[j / PAIR] = round_##kind(x##k, noise##which, &sizes##k);
#define FINISH_INT8(k, kind)                                                                                           \
    uint32_t new##k = shared_exponent(largest_of_words(sizes##k), SHIFT_##kind);                                       \
    if (__builtin_expect(new##k >= 255, 0))                                                                            \
        new##k = shared_exponent_of_finite(rounded##k, (m + PAIR - 1) / PAIR, SHIFT_##kind, SIZE_BITS_##kind);         \
    const uint16_t from##k = (uint16_t)LEAST(new##k, SHIFT_##kind);                                                    \
    if (!is_dense || new##k != old##k) /* a row always writes it: whether it changed cannot be predicted */            \
        scales[k][scale_index] = (uint8_t)new##k;
#define LATER_INT8 || 1
#define WRITE_LATER_INT8(k, kind) write_bytes(ELEMENTS(k, INT8), quantize_##kind(rounded##k[j / PAIR], from##k), left);

typedef float stored_ROW; /* one number for the whole row */
#define SPAN_ROW 4
#define PREPARE_ROW(k, kind)                                                                                           \
    float *shared##k = (float *)s[k] + scale_index;                                                                    \
    floats_t after##k = {0};
#define DECODE_ROW(k, kind) pair_t x##k = {(floats_t){0} + *shared##k, (floats_t){0} + *shared##k};
#define ENCODE_ROW(k, kind, which) after##k = x##k.a;
#define FINISH_ROW(k, kind) *shared##k = after##k[0];
#define LATER_ROW
#define WRITE_LATER_ROW(k, kind)

/* Where a row has one second moment, the element function needs the mean of the row's squared values first. */
#define MEAN_0(element, n_buffers, ...)
#define MEAN_1(element, n_buffers, ...)                                                                                \
    floats_t squares[SUMS] = {{0}}, mean_square = {0};                                                                 \
    for (int64_t j = 0; j < m; j += PAIR) {                                                                            \
        const int64_t left = LEFT;                                                                                     \
        pair_t p_ = read_pair(p + j, left), squared;                                                                   \
        const pair_t g_ = read_pair(g + j, left);                                                                      \
        EACH_##n_buffers(DECODE, __VA_ARGS__)                                                                          \
        element##_squared_lanes(c, &p_.a, g_.a BUFFERS_##n_buffers(FIRST_OF), &squared.a);                             \
        squares[j / LANES % SUMS] += first_of(squared.a * squared.a, left);                                            \
        if (left > LANES) {                                                                                            \
            element##_squared_lanes(c, &p_.b, g_.b BUFFERS_##n_buffers(SECOND_OF), &squared.b);                        \
            squares[(j / LANES + 1) % SUMS] += first_of(squared.b * squared.b, left - LANES);                          \
        }                                                                                                              \
    }                                                                                                                  \
    mean_square += sum_of(squares) / (float)m;
#define MEAN_ARGUMENT_0
#define MEAN_ARGUMENT_1 , mean_square

/* A row that fits into one vector: READ, WEIGH (collect magnitudes) and WRITE for each storage. */
#ifdef __AVX512F__
#define READ(k, how, kind, which) READ_##how(k, kind)
#define WEIGH(k, how, kind, which) WEIGH_##how(k, kind, which)
#define WRITE(k, how, kind, which) WRITE_##how(k, kind, which)
#define ONE_OF(k) , &x##k
#define NOISE_ONE(which) (which ? swap_noise_of_vector(noise) : noise)

#define READ_F32(k, kind) floats_t x##k = read_floats((float *)s[k] + i, LANES);
#define WEIGH_F32(k, kind, which)
#define WRITE_F32(k, kind, which) write_floats((float *)s[k] + i, x##k, LANES);

#define READ_BF16(k, kind) floats_t x##k = from_upper_halves(read_words((uint16_t *)s[k] + i, LANES)).a;
#define WEIGH_BF16(k, kind, which)
#define WRITE_BF16(k, kind, which)                                                                                     \
    const words_t words##k = (words_t)_mm512_zextsi256_si512(NOISE_ONE(which));                                        \
    write_words((uint16_t *)s[k] + i, to_bfloat16((pair_t){x##k, x##k}, words##k), LANES);

#define READ_INT8(k, kind) floats_t x##k = dequantize_vector_##kind((uint8_t *)s[k] + i, scales[k][scale_index]);
#define WEIGH_INT8(k, kind, which)                                                                                     \
    bits_t rounded##k = round_vector(x##k, SHIFT_##kind, NOISE_ONE(which));                                            \
    sizes = which ? pack_sizes(sizes, rounded##k) : rounded##k;
#define WRITE_INT8(k, kind, which)                                                                                     \
    uint32_t new##k = shared_exponent(which ? largest & 0xffff : largest >> 16, SHIFT_##kind);                         \
    if (__builtin_expect(new##k >= 255, 0))                                                                            \
        new##k = shared_exponent_of_finite_lanes(&rounded##k, SHIFT_##kind);                                           \
    scales[k][scale_index] = (uint8_t)new##k;                                                                          \
    quantize_vector_##kind((uint8_t *)s[k] + i, x##k, rounded##k, LEAST(new##k, SHIFT_##kind));

#define READ_ROW(k, kind) floats_t x##k = (floats_t){0} + ((float *)s[k])[scale_index];
#define WEIGH_ROW(k, kind, which)
#define WRITE_ROW(k, kind, which) ((float *)s[k])[scale_index] = x##k[0];

#define MEAN_ONE_0(element, n_buffers)
#define MEAN_ONE_1(element, n_buffers)                                                                                 \
    floats_t squared, mean_square = {0};                                                                               \
    element##_squared_lanes(c, &p_, g_ BUFFERS_##n_buffers(ONE_OF), &squared);                                         \
    squared *= squared;                                                                                                \
    mean_square += sum_of(&squared) / (float)LANES;

#define UPDATE_ONE(element, by_row, n_buffers, ...)                                                                    \
    if (whole == LANES) {                                                                                              \
        floats_t p_ = read_floats(p, LANES), alignment;                                                                \
        const floats_t g_ = read_floats(g, LANES);                                                                     \
        EACH_##n_buffers(READ, __VA_ARGS__)                                                                            \
        MEAN_ONE_##by_row(element, n_buffers)                                                                          \
        element##_lanes(c, &p_, g_ BUFFERS_##n_buffers(ONE_OF) MEAN_ARGUMENT_##by_row, &alignment);                    \
        *count += count_positive(alignment);                                                                           \
        write_floats(p, p_, LANES);                                                                                    \
        const __m256i noise = noise_of_vector(first, inner);                                                           \
        bits_t sizes = {0};                                                                                            \
        EACH_##n_buffers(WEIGH, __VA_ARGS__)                                                                           \
        const uint32_t largest = largest_packed(sizes);                                                                \
        (void)noise, (void)largest;                                                                                    \
        EACH_##n_buffers(WRITE, __VA_ARGS__)                                                                           \
        return;                                                                                                        \
    }
#else
#define UPDATE_ONE(element, by_row, n_buffers, ...)
#endif

/* The number of elements in a pair of vectors: `whole`, which is a constant for the compiler, or what is left of m. */
#define LEFT whole ? whole : m - j

/* Update the m elements from i on, at most MAX_QUANTIZED_WIDTH, that share the scales with index `scale_index`. Elements that
 * share a scale are quantized when all of them are known. `first` and `inner` are the arguments of noise_at. */
#define STORED(element, by_row, n_buffers, NAME, ...)                                                                  \
    INLINE void NAME(const struct element##_lanes_c *c, float *restrict p, const float *restrict g, void *const *s,    \
                     uint8_t *const *scales, int64_t i, int64_t scale_index, const int64_t m, uint32_t first, uint32_t inner, \
                     const int is_dense, const int64_t whole, int64_t *count)                                          \
    {                                                                                                                  \
        (void)scales, (void)scale_index;                                                                               \
        UPDATE_ONE(element, by_row, n_buffers, __VA_ARGS__)                                                            \
        EACH_##n_buffers(PREPARE, __VA_ARGS__)                                                                         \
        MEAN_##by_row(element, n_buffers, __VA_ARGS__)                                                                 \
        for (int64_t j = 0; j < m; j += PAIR) {                                                                        \
            const int64_t left = LEFT;                                                                                 \
            if (is_dense && !(j % BLOCK)) {                                                                            \
                prefetch(p, j, sizeof *p);                                                                             \
                prefetch(g, j, sizeof *g);                                                                             \
                EACH_##n_buffers(FETCH, __VA_ARGS__)                                                                   \
            }                                                                                                          \
            pair_t p_ = read_pair(p + j, left), alignment;                                                             \
            const pair_t g_ = read_pair(g + j, left);                                                                  \
            EACH_##n_buffers(DECODE, __VA_ARGS__)                                                                      \
            element##_lanes(c, &p_.a, g_.a BUFFERS_##n_buffers(FIRST_OF) MEAN_ARGUMENT_##by_row, &alignment.a);        \
            *count += count_positive(alignment.a);                                                                     \
            if (left > LANES) {                                                                                        \
                element##_lanes(c, &p_.b, g_.b BUFFERS_##n_buffers(SECOND_OF) MEAN_ARGUMENT_##by_row, &alignment.b);   \
                *count += count_positive(alignment.b);                                                                 \
            }                                                                                                          \
            write_pair(p + j, p_, left);                                                                               \
            const words_t noise0 = noise_at(first + (uint32_t)j / 2, inner, is_dense || whole);                        \
            const words_t noise1 = swap_noise(noise0);                                                                 \
            (void)noise0, (void)noise1;                                                                                \
            EACH_##n_buffers(ENCODE, __VA_ARGS__)                                                                      \
        }                                                                                                              \
        EACH_##n_buffers(FINISH, __VA_ARGS__)                                                                          \
        for (int64_t j = 0; (0 EACH_##n_buffers(LATER, __VA_ARGS__)) && j < m; j += PAIR) {                            \
            const int64_t left = LEFT;                                                                                 \
            (void)left;                                                                                                \
            EACH_##n_buffers(WRITE_LATER, __VA_ARGS__)                                                                 \
        }                                                                                                              \
    }

/* A kernel for dense tensors. Usually there is neither weight decay nor gradient scaling. The second call has these
 * coefficients as constants, so that the compiler removes the arithmetic. */
#define STORED_LOOP(element, BLOCK_OF, NAME)                                                                           \
    INLINE int64_t NAME##_with(const struct element##_lanes_c *c, float *p, const float *g, void *const *s,            \
                               uint8_t *const *scales, int64_t n, uint64_t position, uint32_t key)                     \
    {                                                                                                                  \
        int64_t i = 0, count = 0;                                                                                      \
        for (; i + QUANTIZATION_BLOCK <= n; i += QUANTIZATION_BLOCK, position += QUANTIZATION_BLOCK)                   \
            BLOCK_OF(c, p + i, g + i, s, scales, i, i / QUANTIZATION_BLOCK, QUANTIZATION_BLOCK, (uint32_t)position >> 1, \
                     mix_bits((uint32_t)(position >> 32) ^ key), 1, PAIR, &count);                                     \
        if (i < n)                                                                                                     \
            BLOCK_OF(c, p + i, g + i, s, scales, i, i / QUANTIZATION_BLOCK, n - i, (uint32_t)position >> 1,            \
                     mix_bits((uint32_t)(position >> 32) ^ key), 1, 0, &count);                                        \
        return count;                                                                                                  \
    }                                                                                                                  \
    static int64_t NAME(float *p, const float *g, void *const *s, uint8_t *const *scales, int64_t n, uint64_t position, \
                        uint32_t key, const void *c_)                                                                  \
    {                                                                                                                  \
        struct element##_lanes_c c = *(const struct element##_lanes_c *)c_;                                            \
        if (c.l2 != 0 || c.shrink != 1 || c.unscale != 1)                                                              \
            return NAME##_with(&c, p, g, s, scales, n, position, key);                                                 \
        c.l2 = 0, c.shrink = c.unscale = 1;                                                                            \
        return NAME##_with(&c, p, g, s, scales, n, position, key);                                                     \
    }

static void widen_bf16(const uint16_t *p, float *x, int64_t n) { (void)widen_BF16(p, x, n); }
static void widen_f16(const uint16_t *p, float *x, int64_t n) { (void)widen_F16(p, x, n); }
static void narrow_bf16(uint16_t *p, const float *x, int64_t n) { narrow_BF16(p, x, n); }
static void narrow_f16(uint16_t *p, const float *x, int64_t n) { narrow_F16(p, x, n); }
static widen_fn *const widen_half[DTYPES] = {[BF16] = widen_bf16, [F16] = widen_f16};
static narrow_fn *const narrow_half[DTYPES] = {[BF16] = narrow_bf16, [F16] = narrow_f16};

#define SUM_ROW(T, m)                                                                                                  \
    {                                                                                                                  \
        SUM(T, float, m)                                                                                               \
        memcpy(sums + i, total, sizeof total);                                                                         \
        i += m;                                                                                                        \
    }

/* Sum the gradients of a row, for gradients of type T. */
#define SUM_GRADS(T)                                                                                                   \
    static void sum_##T(const row_batch *rows, int64_t begin, int64_t end, float *sums)                                \
    {                                                                                                                  \
        typedef float real_t;                                                                                          \
        const value_##T *grads = rows->grads;                                                                          \
        const int64_t width = rows->width, last = rows->ends[rows->count - 1];                                         \
        int64_t i = 0;                                                                                                 \
        STRIPS(SUM_ROW, T)                                                                                             \
    }
SUM_GRADS(F32)
SUM_GRADS(BF16)
SUM_GRADS(F16)
typedef void sum_fn(const row_batch *rows, int64_t begin, int64_t end, float *sums);
static sum_fn *const sum_grads[DTYPES] = {[F32] = sum_F32, [BF16] = sum_BF16, [F16] = sum_F16};

/* Set `c` to the coefficients of a row, where they depend on the row. */
#define STORED_BY_COUNT(element)                                                                                       \
    if (rows->steps)                                                                                                   \
        c = advance_row_step(rows, c_, row);
#define STORED_BY_MISSED_STEPS(element)                                                                                \
    struct element##_lanes_c aging = *(const struct element##_lanes_c *)c_;                                            \
    SET_AGING(element, float, aging)                                                                                   \
    c = &aging;

/* A kernel for tables: the gradients of each row are summed, then the row is updated as one block. ADVANCE is
 * STORED_BY_COUNT or STORED_BY_MISSED_STEPS. */
#define STORED_ROWS(element, n_buffers, BLOCK_OF, NAME, ADVANCE, ...)                                                           \
    INLINE int64_t NAME##_of(const row_batch *rows, const void *c_, const int64_t width, const int64_t whole,          \
                             const int half)                                                                           \
    {                                                                                                                  \
        typedef float real_t;                                                                                          \
        const int64_t size = half ? 2 : 4, grad_bytes = width * (half && rows->grad_dtype != F32 ? 2 : 4);             \
        const struct element##_lanes_c *c = c_;                                                                        \
        const float *grads = rows->grads;                                                                              \
        const int64_t last = rows->count ? rows->ends[rows->count - 1] : 0;                                            \
        int64_t begin = 0, count = 0;                                                                                  \
        uint64_t upper = 0;                                                                                            \
        uint32_t inner = mix_bits(rows->noise_key);                                                                    \
        float sums[MAX_QUANTIZED_WIDTH] __attribute__((aligned(64))), values[MAX_QUANTIZED_WIDTH] __attribute__((aligned(64))); \
        for (int64_t e = 0; e < GRADS_AHEAD && e < last; e++)                                                          \
            prefetch_row(grads, rows->positions[e], grad_bytes);                                                       \
        for (int64_t r = -ROWS_AHEAD; r < rows->count; r++) {                                                          \
            if (r + ROWS_AHEAD < rows->count) {                                                                        \
                const int64_t next = rows->distinct[r + ROWS_AHEAD];                                                   \
                prefetch_row(rows->p, next, width * size);                                                             \
                EACH_##n_buffers(FETCH_ROW, __VA_ARGS__)                                                               \
                if (rows->steps)                                                                                       \
                    prefetch_row(rows->steps, next, sizeof *rows->steps);                                              \
            }                                                                                                          \
            if (r < 0)                                                                                                 \
                continue;                                                                                              \
            const int64_t row = rows->distinct[r], end = rows->ends[r];                                                \
            if (begin + GRADS_AHEAD < last)                                                                            \
                prefetch_row(grads, rows->positions[begin + GRADS_AHEAD], grad_bytes);                                 \
            ADVANCE(element)                                                                                           \
            const uint64_t position = rows->first_position + (uint64_t)(row * width);                                  \
            if (upper != position >> 32)                                                                               \
                upper = position >> 32, inner = mix_bits((uint32_t)upper ^ rows->noise_key);                           \
            int64_t i = 0;                                                                                             \
            if (half) {                                                                                                \
                widen_half[rows->dtype]((uint16_t *)rows->p + row * width, values, width);                             \
                sum_grads[rows->grad_dtype](rows, begin, end, sums);                                                   \
            } else {                                                                                                   \
                STRIPS(SUM_ROW, F32)                                                                                   \
            }                                                                                                          \
            BLOCK_OF(c, half ? values : (float *)rows->p + row * width, sums, rows->s, rows->scales, row * width,      \
                     row, width, (uint32_t)position, inner, 0, whole, &count);                                         \
            if (half)                                                                                                  \
                narrow_half[rows->dtype]((uint16_t *)rows->p + row * width, values, width);                            \
            begin = end;                                                                                               \
        }                                                                                                              \
        return count;                                                                                                  \
    }                                                                                                                  \
    static int64_t NAME(const row_batch *rows, const void *c)                                                          \
    {                                                                                                                  \
        const int half = rows->dtype != F32;                                                                           \
        if (rows->width == 16 && !half)                                                                                \
            return NAME##_of(rows, c, 16, PAIR < 16 ? PAIR : 16, 0);                                                   \
        return rows->width % PAIR ? NAME##_of(rows, c, rows->width, 0, half)                                           \
                                  : NAME##_of(rows, c, rows->width, PAIR, half);                                       \
    }

#define LOOP_0(rule, element, STORAGE)                                                                                 \
    STORED_LOOP(element, rule##_block_##STORAGE##_0, rule##_dense_##STORAGE)
#define LOOP_1(rule, element, STORAGE)
#define ALL_STORED(rule, element, STORAGE, by_row, n_buffers, ...)                                                     \
    STORED(element, by_row, n_buffers, rule##_block_##STORAGE##_##by_row, __VA_ARGS__)                                 \
    LOOP_##by_row(rule, element, STORAGE)                                                                              \
    STORED_ROWS(element, n_buffers, rule##_block_##STORAGE##_##by_row, rule##_rows_##STORAGE##_##by_row,               \
                STORED_BY_COUNT, __VA_ARGS__)
#define EXACT_STORED(rule, element, STORAGE, by_row, n_buffers, ...)                                                   \
    STORED(element, by_row, n_buffers, rule##_block_##STORAGE##_##by_row, __VA_ARGS__)                                 \
    STORED_ROWS(element, n_buffers, rule##_block_##STORAGE##_##by_row, rule##_rows_##STORAGE##_##by_row,               \
                STORED_BY_MISSED_STEPS, __VA_ARGS__)
STORED_RULES(ALL_STORED)
STORED_AGING_RULES(EXACT_STORED)

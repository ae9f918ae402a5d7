/* The arithmetic of batch_inputs.c in one type, REAL. NAMED gives the functions of each type their own names. */

/* Normalize the numbers of a batch, and write the rows of their bins. */
static void NAMED(write_numbers)(const input_layer *m, const input_batch *b)
{
    const int64_t entries = m->entries + m->numbers;
    for (int64_t f = m->id_features, first = 0; first < m->numbers; first += m->lengths[f++])
        for (int64_t k = 0; k < m->lengths[f]; k++) {
            const int64_t j = first + k, known = m->count[j] < m->sample_size ? m->count[j] : m->sample_size;
            const int is_full = known == m->sample_size;
            const double *numbers = (const double *)b->columns[f] + k;
            for (int64_t i = 0; i < b->n; i += MAX_LANES) {
                double x[MAX_LANES], ranks[MAX_LANES];
                int64_t both[MAX_LANES];
                const int64_t left = b->n - i < MAX_LANES ? b->n - i : MAX_LANES;
                for (int64_t lane = 0; lane < MAX_LANES; lane++)
                    x[lane] = lane < left ? numbers[(i + lane) * m->lengths[f]] : 0;
                find_ranks(m->sample + j * m->sample_size, known, x, ranks, both, MAX_LANES);
                for (int64_t lane = 0; lane < left; lane++) {
                    const int64_t bin = isnan(x[lane]) ? m->bins : (int64_t)((double)m->bins * ranks[lane]);
                    b->rows[(i + lane) * entries + m->entries + j] = m->bin_starts[j] + bin;
                    const int is_known = is_full && isfinite(x[lane]);
                    const double normal = is_known ? m->normals[both[lane]] : normal_number(ranks[lane]);
                    /* An infinite number makes the score NaN. */
                    ((REAL *)b->scaled)[(i + lane) * m->numbers + j] = isinf(x[lane]) ? (REAL)NAN : (REAL)normal;
                }
            }
        }
}

/* Write the embeddings of one event, and return its pairwise interactions if the model has them. */
ALWAYS_INLINE REAL NAMED(embed)(const input_layer *m, const input_batch *b, int64_t i, int64_t width)
{
    const int64_t entries = m->entries + m->numbers, fields = m->fields + m->numbers;
    const int64_t *rows = b->rows + i * entries, ahead = (b->n - i) * entries - 1;
    const REAL *table = (const REAL *)m->table, *scaled = (const REAL *)b->scaled + i * m->numbers;
    REAL *restrict to = (REAL *)b->embedded + i * fields * width;
    /* Sums of the default width stay in registers. */
    REAL registers[2 * DEFAULT_WIDTH], *stored = (REAL *)b->sums + i * 2 * width, pairs = 0;
    REAL *sum = width == DEFAULT_WIDTH ? registers : stored, *squares = sum + width;
    for (int64_t k = 0; m->has_pairs && k < 2 * width; k++)
        sum[k] = 0;
    int64_t e = 0;
    for (int64_t f = 0; f < fields; f++, to += width) {
        if (f >= m->fields) {
            const int64_t j = f - m->fields;
            const REAL *row = table + rows[e++] * width, *vector = (const REAL *)m->vectors + j * width;
            for (int64_t k = 0; k < width; k++)
                to[k] = row[k] + scaled[j] * vector[k];
        } else if (!m->is_list[f]) {
            __builtin_prefetch(table + rows[e + ENTRIES_AHEAD < ahead ? e + ENTRIES_AHEAD : ahead] * width);
            const REAL *row = table + rows[e++] * width;
            for (int64_t k = 0; k < width; k++)
                to[k] = row[k];
        } else {
            for (int64_t k = 0; k < width; k++)
                to[k] = 0;
            for (const int64_t end = e + m->lengths[f]; e < end; e++) {
                __builtin_prefetch(table + rows[e + ENTRIES_AHEAD < ahead ? e + ENTRIES_AHEAD : ahead] * width);
                const REAL *row = table + rows[e] * width, weight = b->weights[i * m->entries + e];
                for (int64_t k = 0; k < width; k++)
                    to[k] += row[k] * weight;
            }
        }
        for (int64_t k = 0; m->has_pairs && k < width; k++) {
            sum[k] += to[k];
            squares[k] += to[k] * to[k];
        }
    }
    if (!m->has_pairs)
        return 0;
    for (int64_t k = 0; k < width; k++)
        pairs += sum[k] * sum[k] - squares[k];
    if (stored != sum)
        memcpy(stored, sum, (size_t)(2 * width) * sizeof(REAL));
    return (REAL)0.5 * pairs;
}

/* Return the bias and the linear terms of one event. */
static REAL NAMED(linear_terms)(const input_layer *m, const input_batch *b, int64_t i)
{
    const int64_t entries = m->entries + m->numbers, *rows = b->rows + i * entries, ahead = (b->n - i) * entries - 1;
    const REAL *linear = (const REAL *)m->linear, *scaled = (const REAL *)b->scaled + i * m->numbers;
    REAL terms = 0;
    for (int64_t e = 0; linear && e < entries; e++) {
        __builtin_prefetch(linear + rows[e + ENTRIES_AHEAD < ahead ? e + ENTRIES_AHEAD : ahead]);
        terms += b->weights && e < m->entries ? linear[rows[e]] * b->weights[i * m->entries + e] : linear[rows[e]];
    }
    for (int64_t j = 0; m->slopes && j < m->numbers; j++)
        terms += scaled[j] * ((const REAL *)m->slopes)[j];
    return *(const REAL *)m->bias + terms;
}

static void NAMED(forward)(const input_layer *m, const input_batch *b)
{
    REAL *terms = (REAL *)b->terms;
    for (int64_t i = 0; i < b->n; i++)
        terms[i] = NAMED(linear_terms)(m, b, i);
    if (m->width == DEFAULT_WIDTH)
        for (int64_t i = 0; i < b->n; i++)
            terms[i] += NAMED(embed)(m, b, i, DEFAULT_WIDTH);
    else if (m->width)
        for (int64_t i = 0; i < b->n; i++)
            terms[i] += NAMED(embed)(m, b, i, m->width);
}

/* Write the gradient of each entry's row of the table for event i, and add to the gradients of the vectors. Products are
 * rounded before they are subtracted, as autograd does: where a gradient cancels out, the confidence mask depends on the sign
 * of what is left. */
ALWAYS_INLINE void NAMED(table_gradients)(const input_layer *m, const input_batch *b, int64_t i, double *vectors,
                                          int64_t width)
{
    const int64_t entries = m->entries + m->numbers, fields = m->fields + m->numbers;
    const REAL error = b->term_grads ? ((const REAL *)b->term_grads)[i] : 0;
    const REAL *grads = b->embedded_grads ? (const REAL *)b->embedded_grads + i * fields * width : 0;
    const REAL *embedded = (const REAL *)b->embedded + i * fields * width, *sum = (const REAL *)b->sums + i * 2 * width;
    const REAL *scaled = (const REAL *)b->scaled + i * m->numbers;
    REAL *to = (REAL *)b->table_grads + i * entries * width;
    int64_t e = 0;
    for (int64_t f = 0; f < fields; f++, embedded += width) {
        REAL *restrict first = to;
        if (grads && m->has_pairs)
            for (int64_t k = 0; k < width; k++)
                first[k] = (error * sum[k] - error * embedded[k]) + grads[f * width + k];
        else if (m->has_pairs)
            for (int64_t k = 0; k < width; k++)
                first[k] = error * sum[k] - error * embedded[k];
        else
            for (int64_t k = 0; k < width; k++)
                first[k] = grads ? grads[f * width + k] : 0;
        to += width, e++;
        if (f >= m->fields) {
            double *restrict vector = vectors + (f - m->fields) * width;
            for (int64_t k = 0; k < width; k++)
                vector[k] += (double)(scaled[f - m->fields] * first[k]);
        } else if (m->is_list[f]) {
            /* The first entry is scaled last, because it holds the gradient of the field until then. */
            const float *weights = b->weights + i * m->entries + e - 1;
            for (int64_t l = 1; l < m->lengths[f]; l++, e++, to += width)
                for (int64_t k = 0; k < width; k++)
                    to[k] = first[k] * weights[l];
            for (int64_t k = 0; k < width; k++)
                first[k] *= weights[0];
        }
    }
}

static int64_t NAMED(backward)(const input_layer *m, const input_batch *b)
{
    const int64_t entries = m->entries + m->numbers, wide = m->width ? m->width : 1;
    /* Sums over the events of a batch are computed in double. */
    double *vectors = calloc((size_t)(m->numbers * (wide + 1) + 1), sizeof(double)), *slopes = vectors + m->numbers * wide;
    if (!vectors)
        return -2;
    if (b->table_grads && m->width == DEFAULT_WIDTH)
        for (int64_t i = 0; i < b->n; i++)
            NAMED(table_gradients)(m, b, i, vectors, DEFAULT_WIDTH);
    else if (b->table_grads)
        for (int64_t i = 0; i < b->n; i++)
            NAMED(table_gradients)(m, b, i, vectors, m->width);
    double bias = 0;
    for (int64_t i = 0; b->term_grads && i < b->n; i++) {
        const REAL error = ((const REAL *)b->term_grads)[i];
        bias += (double)error;
        REAL *linear = (REAL *)b->linear_grads + i * entries;
        for (int64_t e = 0; b->linear_grads && e < entries; e++)
            linear[e] = b->weights && e < m->entries ? error * b->weights[i * m->entries + e] : error;
        for (int64_t j = 0; j < m->numbers; j++)
            slopes[j] += (double)(((const REAL *)b->scaled)[i * m->numbers + j] * error);
    }
    for (int64_t k = 0; b->vector_grads && k < m->numbers * m->width; k++)
        ((REAL *)b->vector_grads)[k] = (REAL)vectors[k];
    for (int64_t j = 0; b->slope_grads && j < m->numbers; j++)
        ((REAL *)b->slope_grads)[j] = (REAL)slopes[j];
    if (b->bias_grad)
        *(REAL *)b->bias_grad = (REAL)bias;
    free(vectors);
    return -1;
}

/* The layout of the structs that Python fills in. A test compares it with the numpy dtypes of native/structs.py. */
#include "structs.h"

#include <stddef.h>

typedef struct {
    const char *name; /* struct and field; a name without a field is the whole struct */
    int64_t offset, size;
} field_layout;

#define FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(((type *)0)->field)}
#define STRUCT(type) {#type, 0, sizeof(type)}

static const field_layout layout[] = {
    STRUCT(dense_tensor), FIELD(dense_tensor, param), FIELD(dense_tensor, grad), FIELD(dense_tensor, state),
    FIELD(dense_tensor, step), FIELD(dense_tensor, counts), FIELD(dense_tensor, elements), FIELD(dense_tensor, kernel),
    FIELD(dense_tensor, dtype), FIELD(dense_tensor, coefficient_set), FIELD(dense_tensor, scales),
    FIELD(dense_tensor, seed), FIELD(dense_tensor, moments),

    STRUCT(sparse_table), FIELD(sparse_table, param), FIELD(sparse_table, state), FIELD(sparse_table, step),
    FIELD(sparse_table, counts), FIELD(sparse_table, rows), FIELD(sparse_table, width), FIELD(sparse_table, kernel),
    FIELD(sparse_table, dtype), FIELD(sparse_table, scales), FIELD(sparse_table, seed), FIELD(sparse_table, moments),
    FIELD(sparse_table, row_moments), FIELD(sparse_table, row_steps), FIELD(sparse_table, set_of),
    FIELD(sparse_table, coefficient_sets), FIELD(sparse_table, last_count), FIELD(sparse_table, grad_dtype),
    FIELD(sparse_table, aging), FIELD(sparse_table, max_missed),

    STRUCT(event_parameter), FIELD(event_parameter, param), FIELD(event_parameter, state),
    FIELD(event_parameter, counts), FIELD(event_parameter, rows), FIELD(event_parameter, width),

    STRUCT(event_model), FIELD(event_model, linear), FIELD(event_model, table), FIELD(event_model, bias),
    FIELD(event_model, slopes), FIELD(event_model, vectors), FIELD(event_model, kernel), FIELD(event_model, entries),
    FIELD(event_model, fields), FIELD(event_model, numbers), FIELD(event_model, field_of),
    FIELD(event_model, alike_from), FIELD(event_model, bin_starts), FIELD(event_model, bins), FIELD(event_model, count),
    FIELD(event_model, sample), FIELD(event_model, sample_size), FIELD(event_model, slot_stride),
    FIELD(event_model, max_shift),

    STRUCT(event_batch), FIELD(event_batch, n), FIELD(event_batch, rows), FIELD(event_batch, weights),
    FIELD(event_batch, numbers), FIELD(event_batch, labels), FIELD(event_batch, c), FIELD(event_batch, scores),

    STRUCT(input_layer), FIELD(input_layer, table), FIELD(input_layer, linear), FIELD(input_layer, bias),
    FIELD(input_layer, slopes), FIELD(input_layer, vectors), FIELD(input_layer, dtype), FIELD(input_layer, width),
    FIELD(input_layer, has_pairs), FIELD(input_layer, id_features), FIELD(input_layer, entries),
    FIELD(input_layer, fields), FIELD(input_layer, numbers), FIELD(input_layer, lengths), FIELD(input_layer, is_list),
    FIELD(input_layer, zero_is_missing), FIELD(input_layer, starts), FIELD(input_layer, sizes),
    FIELD(input_layer, bin_starts), FIELD(input_layer, bins), FIELD(input_layer, count), FIELD(input_layer, sample),
    FIELD(input_layer, sample_size), FIELD(input_layer, slot_stride), FIELD(input_layer, max_shift),
    FIELD(input_layer, normals),

    STRUCT(input_batch), FIELD(input_batch, n), FIELD(input_batch, is_training), FIELD(input_batch, columns),
    FIELD(input_batch, rows), FIELD(input_batch, weights), FIELD(input_batch, scaled), FIELD(input_batch, embedded),
    FIELD(input_batch, sums), FIELD(input_batch, terms), FIELD(input_batch, embedded_grads),
    FIELD(input_batch, term_grads), FIELD(input_batch, table_grads), FIELD(input_batch, linear_grads),
    FIELD(input_batch, vector_grads), FIELD(input_batch, slope_grads), FIELD(input_batch, bias_grad),

    STRUCT(text_lines), FIELD(text_lines, data), FIELD(text_lines, line_begin), FIELD(text_lines, line_end),
    FIELD(text_lines, n), FIELD(text_lines, begin), FIELD(text_lines, end), FIELD(text_lines, quoted),
    FIELD(text_lines, status), FIELD(text_lines, columns), FIELD(text_lines, stride), FIELD(text_lines, fields),
    FIELD(text_lines, column_of), FIELD(text_lines, separator), FIELD(text_lines, names), FIELD(text_lines, name_ends),

    STRUCT(text_values), FIELD(text_values, data), FIELD(text_values, begin), FIELD(text_values, end),
    FIELD(text_values, quoted), FIELD(text_values, n), FIELD(text_values, quoting), FIELD(text_values, parse_as),
    FIELD(text_values, buckets), FIELD(text_values, accepts_booleans), FIELD(text_values, out),
    FIELD(text_values, is_parsed),

    STRUCT(tracked_container), FIELD(tracked_container, object), FIELD(tracked_container, is_dict),
    FIELD(tracked_container, count), FIELD(tracked_container, expected),

    STRUCT(replay_part), FIELD(replay_part, fixed_tensors), FIELD(replay_part, fixed),
    FIELD(replay_part, fixed_addresses), FIELD(replay_part, fixed_sizes), FIELD(replay_part, fixed_kinds),
    FIELD(replay_part, count), FIELD(replay_part, grads), FIELD(replay_part, grad_sizes),
    FIELD(replay_part, grad_kinds), FIELD(replay_part, steps),
    FIELD(replay_part, columns), FIELD(replay_part, coefficients), FIELD(replay_part, is_sparse),

    STRUCT(replay_launch), FIELD(replay_launch, function), FIELD(replay_launch, blocks_x),
    FIELD(replay_launch, blocks_y), FIELD(replay_launch, threads), FIELD(replay_launch, shared_bytes),
    FIELD(replay_launch, arguments),

    STRUCT(replay_step), FIELD(replay_step, torch), FIELD(replay_step, python), FIELD(replay_step, cuda),
    FIELD(replay_step, containers), FIELD(replay_step, container), FIELD(replay_step, parts),
    FIELD(replay_step, part), FIELD(replay_step, launches), FIELD(replay_step, launch), FIELD(replay_step, context),
    FIELD(replay_step, host), FIELD(replay_step, words), FIELD(replay_step, slots), FIELD(replay_step, slot),
    FIELD(replay_step, events), FIELD(replay_step, device),

    STRUCT(table_row), FIELD(table_row, id), FIELD(table_row, last_seen), FIELD(table_row, frequency),
    FIELD(table_row, used_in),

    STRUCT(id_index), FIELD(id_index, slots), FIELD(id_index, bits), FIELD(id_index, rows), FIELD(id_index, row_count),
    FIELD(id_index, first_free), FIELD(id_index, free_count), FIELD(id_index, time), FIELD(id_index, step),

    STRUCT(id_sketch), FIELD(id_sketch, counters), FIELD(id_sketch, bits), FIELD(id_sketch, added),
    FIELD(id_sketch, window), FIELD(id_sketch, threshold),

    STRUCT(id_batch), FIELD(id_batch, n), FIELD(id_batch, ids), FIELD(id_batch, rows), FIELD(id_batch, misses),
    FIELD(id_batch, new_ids), FIELD(id_batch, new_counts), FIELD(id_batch, new_rows), FIELD(id_batch, new_count),
    FIELD(id_batch, refused),

    STRUCT(id_feature), FIELD(id_feature, index), FIELD(id_feature, sketch), FIELD(id_feature, batch),
    FIELD(id_feature, has_missing), FIELD(id_feature, missing_id), FIELD(id_feature, row_limit),
    FIELD(id_feature, record_count), FIELD(id_feature, start), FIELD(id_feature, table_rows),
    FIELD(id_feature, length), FIELD(id_feature, stride), FIELD(id_feature, first_unused),
    FIELD(id_feature, is_full), FIELD(id_feature, admitted),

    STRUCT(row_memory), FIELD(row_memory, data), FIELD(row_memory, bytes), FIELD(row_memory, value),

    {0, 0, 0},
};

/* Return the layout of all structs; the entry without a name is the end. */
EXPORT const field_layout *cadam_struct_layout(void) { return layout; }

/* The structs that Python fills in, one numpy dtype of native/structs.py for each.
 *
 * All fields are 64 bits wide, except in table_row. Addresses that C never dereferences as one fixed type are int64_t; 0 means that there is
 * none.
 */
#ifndef CADAM_STRUCTS_H
#define CADAM_STRUCTS_H

#include "cadam.h"

/* A dense parameter in a step, see dense_update.c. */
typedef struct {
    int64_t param, grad, state[MAX_BUFFERS];
    int64_t step;            /* address of the step count, a float32 */
    int64_t counts;          /* address of three int64: elements aligned, touched and seen */
    int64_t elements;
    int64_t kernel;          /* index from cadam_kernel_index */
    int64_t dtype;           /* enum dtype */
    int64_t coefficient_set; /* index among the sets of coefficients of the step */
    int64_t scales[MAX_QUANTIZED];
    int64_t seed;            /* seed of stochastic rounding */
    int64_t moments;         /* enum moment_storage */
} dense_tensor;

/* An embedding table in a step, see sparse_update.c. Fields of the same name have the meaning they have in dense_tensor. */
typedef struct {
    int64_t param, state[MAX_BUFFERS], step, counts, rows, width, kernel, dtype, scales[MAX_QUANTIZED], seed, moments;
    int64_t row_moments;      /* bit k is set if buffer k has one number for each row */
    int64_t row_steps;        /* address of the rows' own step counts, int32, or 0 */
    int64_t set_of;           /* address of int32 by step count: the number of the set of coefficients */
    int64_t coefficient_sets; /* number of sets of coefficients */
    int64_t last_count;       /* the last step count of set_of; all later ones use its set */
    int64_t grad_dtype;       /* enum dtype: that of the table, or F32 where the table has half precision */
    int64_t aging;            /* address of the aging coefficients by number of missed steps, or 0 if updates are lazy;
                                 else row_steps are the steps of the rows' last updates */
    int64_t max_missed;       /* the largest number of missed steps that `aging` has coefficients for */
} sparse_table;

/* A parameter of a per-event model, see per_event_models.c. A dense parameter is one row. */
typedef struct {
    int64_t param; /* 0 where the model does not have this parameter */
    int64_t state[MAX_BUFFERS], counts, rows, width;
} event_parameter;

/* A model that learns from one event at a time. */
typedef struct {
    event_parameter linear; /* table with one weight for each row */
    event_parameter table;  /* table with one embedding for each row */
    event_parameter bias, slopes, vectors;
    int64_t kernel;
    int64_t entries;        /* rows that one event names, without those of its numeric features */
    int64_t fields;         /* fields of an event, without its numeric features */
    int64_t numbers;        /* numeric features; each is one more field with one more row, that of its bin */
    int64_t field_of;       /* address of int32 by entry: its field */
    int64_t alike_from;     /* address of int32 by entry: the first entry that may name the same row */
    int64_t bin_starts;     /* address of int64 by numeric feature: the row of its first bin */
    int64_t bins;           /* bins of a numeric feature; one more row stands for a missing value */
    int64_t count;          /* address of int64 by numeric feature: how many values it had */
    int64_t sample;         /* address of double [numbers][sample_size]: sorted earlier values, then infinity */
    int64_t sample_size, slot_stride, max_shift; /* see NumberNormalizer in online/models/inputs.py */
} event_model;

/* The events of one call. */
typedef struct {
    int64_t n;
    const int64_t *rows;    /* [n][entries] */
    const float *weights;   /* [n][entries], or 0 if all are 1 */
    const double *numbers;  /* [n][numbers]; NaN where missing */
    const float *labels;    /* [n]; NaN where the event is only scored */
    const float *c;         /* [n][MAX_COEFFICIENTS]: the coefficients of each step */
    float *scores;          /* [n], written: scores before learning */
} event_batch;

/* The input layer of a model, see batch_inputs.c. Features with ids come first, then numeric features; of those with ids,
 * single ids come before lists. */
typedef struct {
    int64_t table, linear, bias, slopes, vectors; /* addresses of the parameters; 0 where the model does not have one */
    int64_t dtype;                  /* enum dtype of the parameters: F32 or F64 */
    int64_t width;                  /* width of an embedding; 0 if the model has none */
    int64_t has_pairs;              /* whether pairwise interactions are part of the terms */
    int64_t id_features, entries, fields, numbers; /* entries and fields do not include those of numbers */
    const int64_t *lengths;         /* by feature: values of one event */
    const int64_t *is_list, *zero_is_missing; /* by feature with ids */
    const int64_t *starts, *sizes;  /* by feature with ids: its first row, and how many it has */
    const int64_t *bin_starts;      /* by number; the following fields are as in event_model */
    int64_t bins;
    int64_t *count;
    double *sample;
    int64_t sample_size, slot_stride, max_shift;
    const double *normals;          /* [2 * sample_size + 1]: what cadam_normal_numbers has written */
} input_layer;

/* A batch of events of an input layer. All entries of an event include those of its numbers. */
typedef struct {
    int64_t n, is_training;
    const void *const *columns;     /* by feature: int64 or double [n][length]; numbers are NaN where missing */
    int64_t *rows;                  /* [n][all entries], written by the forward pass, as all fields up to `terms` */
    float *weights;                 /* [n][entries], or 0 if no feature is a list */
    int64_t scaled;                 /* [n][numbers]: the normalized numbers */
    int64_t embedded;               /* [n][all fields][width] */
    int64_t sums;                   /* [n][2][width]: sums over the fields' embeddings and their squares, if has_pairs */
    int64_t terms;                  /* [n] */
    int64_t embedded_grads, term_grads; /* gradients that the backward pass reads; 0 if they are zero */
    int64_t table_grads, linear_grads;  /* written by the backward pass: [n][all entries][width] and [n][all entries] */
    int64_t vector_grads, slope_grads, bias_grad; /* written by the backward pass */
} input_batch;

typedef const uint8_t text;

/* Lines of CSV or JSON to be split, see text_parsing.c. The ranges of values are written to [columns][stride] arrays; a
 * missing value begins at -1. */
typedef struct {
    text *data;
    const int64_t *line_begin, *line_end;
    int64_t n;                /* number of lines */
    int64_t *begin, *end;     /* [columns][stride], written */
    uint8_t *quoted;          /* [columns][stride], written for JSON: whether the value is a string */
    uint8_t *status;          /* [n], written */
    int64_t columns, stride;
    int64_t fields;           /* CSV: fields of a line; 0 for JSON */
    const int64_t *column_of; /* CSV: the column of each field, or -1 */
    int64_t separator;        /* CSV: the character between fields */
    text *names;              /* JSON: the names of the columns, one after the other */
    const int64_t *name_ends; /* JSON: where each name ends */
} text_lines;

/* Values to be converted. */
typedef struct {
    text *data;
    const int64_t *begin, *end;
    const uint8_t *quoted;    /* [n], if `quoting` is MIXED */
    int64_t n, quoting, parse_as;
    int64_t buckets;          /* number of buckets of hashes */
    int64_t accepts_booleans; /* whether true and false are the numbers 1 and 0 */
    void *out;                /* [n], written: double for numbers, else int64 */
    uint8_t *is_parsed;       /* [n], written */
} text_values;

/* Functions of libtorch: its C API (torch/csrc/inductor/aoti_torch/c/shim.h) and is_neg, in the order of
 * native/torch_symbols.py. A
 * tensor argument is the address of an at::Tensor, which consists of one pointer: the number that Python shows as
 * tensor._cdata. Functions that return int32_t return 0 for success. */
typedef struct {
    parallel_for_fn *parallel_for;
    int32_t (*get_layout)(void **tensor, int32_t *layout);
    int32_t (*get_data_ptr)(void **tensor, void **data);
    int32_t (*get_numel)(void **tensor, int64_t *numel);
    int32_t (*get_dtype)(void **tensor, int32_t *dtype);
    int32_t (*get_device_type)(void **tensor, int32_t *device_type);
    int32_t (*get_device_index)(void **tensor, int32_t *device_index);
    int32_t (*is_contiguous)(void **tensor, _Bool *contiguous);
    _Bool (*is_neg)(void **tensor);
} torch_functions;

/* Functions of Python's C API. They may only be called by a thread that holds the global interpreter lock. */
typedef struct {
    int (*dict_next)(void *dict, int64_t *position, void **key, void **value);
    int64_t (*list_size)(void *list);
    void *(*list_item)(void *list, int64_t i);
    void *(*save_thread)(void);
    void (*restore_thread)(void *thread);
} python_functions;

/* Functions of the CUDA driver; 0 is success. */
typedef struct {
    int (*current_context)(void **context);
    int (*is_capturing)(void *stream, int *status);
    int (*event_query)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*copy_to_device)(uint64_t to, const void *from, uint64_t bytes, void *stream);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra);
} cuda_functions;

/* A Python dict or list and the objects that it must contain, in this order. 0 stands for any object. */
typedef struct {
    void *object;
    int64_t is_dict, count;
    void **expected;
} tracked_container;

/* Parameters of a replayed step that share one row of coefficients. On the device lies that row, followed by the addresses
 * of the gradients; each part begins at a multiple of 16 bytes. */
typedef struct {
    /* Parameters and their state, which must not have moved: */
    int64_t fixed_tensors;
    void **fixed;
    const int64_t *fixed_addresses, *fixed_sizes, *fixed_kinds;
    /* The gradients: */
    int64_t count; /* number of parameters */
    void **grads;
    const int64_t *grad_sizes, *grad_kinds;
    float *steps;
    int64_t columns;
    const double *coefficients; /* the first one is the step that they are for */
    int64_t is_sparse; /* then Python reads the gradients */
} replay_part;

/* A kernel launch. Without blocks there is none. */
typedef struct {
    void *function;
    int64_t blocks_x, blocks_y, threads, shared_bytes;
    void **arguments;
} replay_launch;

/* A step of the optimizer on CUDA that is taken again, see step_replay.c. */
typedef struct {
    const torch_functions *torch;
    const python_functions *python;
    const cuda_functions *cuda;
    int64_t containers;
    const tracked_container *container;
    int64_t parts;
    const replay_part *part;
    int64_t launches;
    const replay_launch *launch;
    void *context;
    int64_t *host;  /* [slots][words], pinned memory that the device copies from */
    int64_t words, slots, slot;
    void **events;  /* one for each slot: it has happened when the device has read the slot */
    uint64_t device; /* where the device keeps its copy */
} replay_step;

/* A row of a table whose rows belong to ids, see id_index.c. A table has many, so two fields have 32 bits. */
typedef struct {
    uint64_t id;         /* the id, or if the row is free, the next free row or 0 */
    int64_t last_seen;   /* the time of the last batch that contained the id */
    uint32_t frequency;  /* how often the id was seen, at most MAX_FREQUENCY; 0 if the row is free */
    uint32_t used_in;    /* the optimizer step, counted modulo 2^32, for which the row was last used */
} table_row;

/* The index of a table from ids to rows. Row 0 does not belong to an id. */
typedef struct {
    uint64_t *slots;     /* [2^bits]: the upper half of the id's hash and the row, or 0 if the slot is empty */
    int64_t bits;
    table_row *rows;
    int64_t row_count;   /* rows that were ever used, including row 0 */
    int64_t first_free;  /* the first of the free rows, which form a list, or 0 */
    int64_t free_count;
    int64_t time;        /* stream time of the present batch */
    int64_t step;        /* the number of the optimizer step that follows; rows that it needs are not released */
} id_index;

/* A count-min sketch: how often ids were seen that have no row. */
typedef struct {
    uint16_t *counters;  /* [SKETCH_DEPTH][2^bits] */
    int64_t bits;
    int64_t added;       /* sightings since the counters were last halved */
    int64_t window;      /* the counters are halved after this number of sightings */
    int64_t threshold;   /* an id gets a row when it was seen this often */
} id_sketch;

/* A batch of ids that is looked up for training. */
typedef struct {
    int64_t n;
    const uint64_t *ids;
    int64_t *rows;       /* [n], written */
    int64_t misses;      /* ids without a row */
    uint64_t *new_ids;   /* [misses], written: the distinct ids that get a row, in order of appearance */
    int64_t *new_counts; /* [misses], written: how often each of them is in the batch */
    int64_t *new_rows;   /* [misses], written: their rows; 0 if there was no room */
    int64_t new_count;
    int64_t refused;     /* ids of the batch that have row 0 */
} id_batch;

/* A feature of which the ids of a batch are looked up together with those of other features. Its rows in a batch are counted
 * from 1; row 0 is for missing ids, and row 1 is row 0 of the index. */
typedef struct {
    id_index *index;
    id_sketch *sketch;    /* 0 if all ids are admitted */
    id_batch batch;
    int64_t has_missing;  /* whether an id that is equal to missing_id is missing */
    int64_t missing_id;
    int64_t row_limit;    /* rows of the index, including row 0 */
    int64_t record_count; /* records of rows that are allocated */
    int64_t start;        /* row 0 of the index in the tables of the model */
    int64_t *table_rows;  /* written: the rows of the batch in these tables, or 0 if they are not needed */
    int64_t length;       /* consecutive ids, which belong to one event and have consecutive entries in table_rows */
    int64_t stride;       /* entries of table_rows from one event to the next */
    int64_t first_unused; /* written: the rows of the index that were ever used before this batch */
    int64_t is_full;      /* written: whether there was no room for the new ids, so that no row was given to them */
    int64_t admitted;     /* written: the number of rows that were given to new ids */
} id_feature;

/* Memory of the tables of a model, or of the state of their optimizer, with a part for each row. */
typedef struct {
    char *data;
    int64_t bytes;        /* bytes of a row */
    const char *value;    /* the state of a row that was never updated, or 0 if the memory is that of a table */
} row_memory;

#endif

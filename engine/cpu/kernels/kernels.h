/* Kernels for CPUs with AVX2 or AVX-512 BF16, which engine/cpu/ calls through ctypes. C11, no library but libm, no
 * state. Built from all .c files of this folder into one shared object, with
 *     -O3 -std=c11 -ffp-contract=off -fno-math-errno -shared -fPIC
 * and no option that names a processor: the files choose their instructions, and td_supported() uses none of them.
 *
 * The functions of the forward exist once for each width of registers, and their exported names end in it: td_run_256
 * needs AVX2 and FMA, td_run_512 needs AVX-512 BF16. Both read the same packed weights. Their results differ in the
 * last bits.
 *
 * bf16 values are uint16_t. Tensors are row-major; strides are counted in elements. Nothing here allocates: the
 * caller passes scratch, aligned to 64 bytes. No function fails. The caller asserts that in_features are even, head_dim
 * is a multiple of 16 of at most 256, rotary_dim is even, and the heads are a multiple of the KV heads.
 *
 * A row of a result depends on that row alone: not on the other rows of the call, nor on how a sequence was cut into
 * chunks. Every sum runs in one order: products over the input features from the first to the last, attention over
 * tiles of positions counted from the sequence's beginning. So a token computed alone, among others, or in a long chunk
 * has the same bits.
 */
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

enum { TANDEM_SILU = 0, TANDEM_GELU_TANH = 1 };

/* A product y = x W^T + b. `panels`: W as td_pack laid it out, aligned to 64 bytes. bias may be NULL. */
typedef struct {
    const bf16 *panels;
    const float *bias;
    int64_t in_features, out_features;
} td_product;

/* Norm weights are float32 and include any constant that the model adds (Gemma: 1). NULL: the layer has none. */
typedef struct {
    const float *input_norm;          /* [hidden], before attention */
    const float *query_norm;          /* see td_model.norms_whole_rows */
    const float *key_norm;
    const float *attention_out_norm;  /* [hidden], of attention's output before it is added to the residual */
    const float *ffn_norm;            /* [hidden], before the feed-forward */
    const float *ffn_out_norm;        /* [hidden], of the feed-forward's output before it is added */
    td_product qkv;                   /* rows: all query heads, all key heads, all value heads */
    td_product out;
    td_product gate_up;               /* of td_pack_gate_up; out_features: 2 * intermediate; bias: gate, then up */
    td_product down;
    bf16 *keys, *values;              /* of the pool's block 0 in this layer: [block_size, kv_heads, head_dim] */
    int64_t window;                   /* the number of tokens that a token sees, itself included; 0: all */
    int64_t rotary;                   /* which of td_step.cos / sin */
} td_layer;

typedef struct {
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    int64_t rotary_dim;               /* leading elements of a head that are rotated, in halves (rotate_half) */
    int64_t activation;
    int64_t norms_whole_rows;         /* query_norm, key_norm: 0: [head_dim], of each head; 1: all heads as one row */
    float norm_eps, scaling, softcap; /* softcap 0: none */
    int64_t block_size, block_elems;  /* the pool's; block_elems: from one block to the next */
    const td_layer *layers;
    const float *final_norm;
    td_product head;
} td_model;

/* One step: the arrays of engine/batch.py's PackedBatch, int64, on the CPU. At most as many logit rows as tokens. */
typedef struct {
    int64_t num_tokens, num_sequences, num_logit_rows, table_stride;
    const int64_t *slot_blocks, *slot_offsets;   /* [tokens] */
    const int64_t *block_tables;                 /* [sequences, table_stride] */
    const int64_t *query_starts;                 /* [sequences + 1] */
    const int64_t *context_lens;                 /* [sequences] */
    const int64_t *logit_rows;                   /* [logit rows] */
    const float *cos[2], *sin[2];                /* [tokens, rotary_dim] */
    float *hidden;                               /* [tokens, hidden]: the embeddings; overwritten */
    float *logits;                               /* [logit rows, vocab] */
    void *scratch;
    void (*written)(void);                       /* called when the K and V of all tokens are in the pool, or NULL */
} td_step;

/* A file that defines TD_BITS declares and defines the functions of this width. */
#ifdef TD_BITS
#define TD_JOIN(name, bits) name##_##bits
#define TD_OF(name, bits) TD_JOIN(name, bits)
#define td_packed_elems TD_OF(td_packed_elems, TD_BITS)
#define td_pack TD_OF(td_pack, TD_BITS)
#define td_pack_gate_up TD_OF(td_pack_gate_up, TD_BITS)
#define td_scratch_bytes TD_OF(td_scratch_bytes, TD_BITS)
#define td_run TD_OF(td_run, TD_BITS)
#define td_linear_scratch_bytes TD_OF(td_linear_scratch_bytes, TD_BITS)
#define td_linear TD_OF(td_linear, TD_BITS)
#define td_rms_norm TD_OF(td_rms_norm, TD_BITS)
#define td_attend TD_OF(td_attend, TD_BITS)
#endif

int64_t td_version(void);
/* Returns the widest registers that this processor can run the forward with and whose contents the system saves: 512,
 * 256, or 0 if it cannot run it. Always safe to call. */
int64_t td_supported(void);

/* Returns the number of bf16 elements of a packed weight; packs `weight`, [out_features, in_features]. */
int64_t td_packed_elems(int64_t out_features, int64_t in_features);
void td_pack(const bf16 *weight, int64_t stride, int64_t out_features, int64_t in_features, bf16 *panels);
/* Packs two weights of [intermediate, in_features], interleaved, into the elements of 2 * intermediate features. */
void td_pack_gate_up(const bf16 *gate, int64_t gate_stride, const bf16 *up, int64_t up_stride, int64_t intermediate,
                     int64_t in_features, bf16 *panels);

/* Returns the most bytes of scratch that a step of `num_tokens` needs. */
int64_t td_scratch_bytes(const td_model *model, int64_t num_tokens);
/* Runs all layers, the final norm and the head. */
void td_run(const td_model *model, const td_step *step);

/* Parts of a step, for tests and measurements. td_linear needs td_linear_scratch_bytes(rows) of scratch, and td_attend
 * no more than a step; its query and its output are [tokens, heads, head_dim]. */
int64_t td_linear_scratch_bytes(int64_t rows);
void td_linear(const bf16 *x, int64_t rows, const td_product *product, float *y, void *scratch);
void td_rms_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps, bf16 *y);
void td_attend(const td_model *model, const td_layer *layer, const td_step *step, const bf16 *query, bf16 *output,
               void *scratch);

/* Drawing, which runs on any processor (draw.c). The token of a row is -1, and the caller draws it by other means, if a
 * logit is NaN, if the largest logit is not finite, or if the temperature is too high. */
typedef struct {
    uint64_t key;             /* of the noise */
    int64_t top_k;            /* 0: all */
    double temperature;       /* 0: the token with the largest logit, of equals the lowest id */
    double top_p;             /* not below 1: all */
    double least_score;       /* log(min-p); -inf: all */
    int64_t num_banned;
    const float *adjusted;    /* [vocab]: the row's logits instead of td_draws.logits; NULL: those */
    const uint32_t *mask;     /* [mask_words]: bit i: token i may be drawn, and none beyond; NULL: all may */
} td_sampling;

typedef struct {
    const void *logits;       /* [rows, vocab] of this stride: float, or bf16; not changed */
    int64_t is_bf16, stride, rows, vocab;
    const td_sampling *samplings;  /* [rows] */
    const int64_t *banned;    /* token ids of all rows, row after row; ids outside the vocabulary are ignored */
    int64_t *token_ids;       /* [rows] */
    void *scratch;            /* td_draw_scratch_bytes(vocab) */
    int64_t mask_words;
} td_draws;

int64_t td_draw_scratch_bytes(int64_t vocab);
/* Draws with the widest registers of this processor, up to `widest` bits. The width changes no token. */
void td_draw(const td_draws *draws, int64_t widest);

#endif

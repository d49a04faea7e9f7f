/* Internal to model/: what one rank holds, shared by forward_load.c, forward.c and mtp.c. */
#pragma once

#include "model/forward.h"

typedef struct Attn {
    Mat *q_a, *q_b, *kv_a, *kv_b, *o; /* q_b, kv_b: this rank's heads; o: their columns */
    Tensor q_a_norm, kv_a_norm;       /* [1, q_lora], [1, kv_lora] */
    Mat *wq_b, *wk, *w_proj;          /* indexer, NULL on layers that share */
    Tensor k_norm_w, k_norm_b;        /* [1, index_dim] */
} Attn;

typedef struct Mlp {
    Mat *gate, *up, *down; /* this rank's rows of gate and up, columns of down */
} Mlp;

typedef struct Layer {
    Tensor in_norm, post_norm; /* [1, hidden] */
    Attn attn;
    Mlp mlp; /* dense layers: the MLP; others: the shared experts */
    bool has_mlp;
    Mat *router;        /* [n_experts, hidden]; NULL on dense layers */
    Tensor router_bias; /* [1, n_experts] */
    Experts *experts;
    bool *resident; /* [n_experts]; NULL: all */
} Layer;

/* A layer's next experts, between load and swap. */
typedef struct NextPlace {
    int layer;
    Experts *experts;
    bool *resident; /* NULL: nothing is loaded */
} NextPlace;

typedef struct MtpWeights {
    Mat *eh_proj;                   /* [hidden, 2 hidden] */
    Tensor enorm, hnorm, head_norm; /* [1, hidden] */
} MtpWeights;

/* Activations, allocated once; a step uses the first n rows. */
typedef struct Work {
    Tensor x, h, y; /* [n, hidden]: residual, normed input, block output */
    Tensor q_a, q;  /* [n, q_lora], [n, H * (nope + rope)] */
    Tensor kv, key; /* [n, kv_lora + rope], [n, index_dim] */
    Tensor iq, iw;  /* [n, index_heads * index_dim], [n, index_heads] */
    Tensor topk;    /* [n, K] i32, shared by the ranks; outlives a layer: sharing layers reuse it */
    Tensor ql, ol, o;          /* [n, H * (kv_lora + rope)], [n, H * kv_lora], [n, H * v] */
    Tensor gate, up;           /* [n, inner] */
    Tensor score, id, weight;  /* [n, n_experts], [n, k] i32, [n, k] */
    Tensor final;              /* [n, hidden] */
    Tensor rows, part, logits; /* [m, hidden], [m, vocab / ranks], [m, vocab] shared */
    Tensor pair, state;        /* MTP: [n, 2 hidden], [n, hidden] */
} Work;

struct Forward {
    ForwardConf conf;
    ExpertPort port;
    Shape shape;
    const Ops *ops;
    Dev *dev;
    int heads;     /* of this rank */
    int max_inner; /* widest MLP of this rank */
    Mat *embed, *head;
    Tensor final_norm;
    Layer *layer; /* [n_layers + n_mtp] */
    int n_layers; /* loaded, the MTP layer included */
    MtpWeights mtp;
    Work work;
    int n_final; /* rows of work.final that the last step wrote */
    const Weights *weights;
    NextPlace next;
    bool any_remote;
    float *host_x, *host_weight, *host_y; /* rank 0 with remote experts: staging for the port */
    int32_t *host_id;
};

/* forward_load.c */
int forward_load_weights(Forward *f, const Weights *w, Err *err);
void forward_free_weights(Forward *f);
/* forward.c: one decoder layer on work.x in place. A remote failure is kept in *err, the layer goes
 * on. */
int forward_layer(Forward *f, int layer, int n, const ForwardProbe *probe, Err *err);
/* forward.c: rows of normed hidden states -> logits. */
void forward_head(Forward *f, Tensor hidden, const int32_t *logit_row, int n_logits,
                  Tensor *logits);

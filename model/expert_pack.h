/* Makes expert files from a checkpoint. Any thread; starts threads of its own. */
#pragma once

#include "model/expert_file.h"
#include "model/weights.h"

typedef struct ExpertPackConf {
    const Weights *weights;
    const char *dir; /* exists */
    IqGeom geom;     /* hidden and inner as in the model */
    int threads;
    /* Called now and then on one thread with the units done of the layer; false: stop. May be NULL.
     */
    bool (*progress)(void *arg, int layer, int done, int total);
    void *arg;
} ExpertPackConf;

typedef struct ExpertPackResult {
    bool kept;    /* the file was there, complete and right */
    double loss;  /* relative rms error over the layer's weights */
    double worst; /* of one expert */
    int worst_expert;
    uint64_t bytes; /* of the file */
} ExpertPackResult;

/* Whether all files that the directory has for this model's layers are of this checkpoint and
 * geometry: E_MISMATCH names one that is not, E_UNSUPPORTED one of another version. */
int expert_pack_check(const ExpertPackConf *conf, Err *err);

/* Writes the file of one MoE layer, or keeps the one that is there when its header is what would be
 * written and its size is right. The same checkpoint and geometry give the same bytes, with any
 * number of threads. Written under another name, synced, then renamed: a file that has the name is
 * complete. E_CANCELED when progress says so; E_MISMATCH for a file of another model or geometry.
 */
int expert_pack_layer(const ExpertPackConf *conf, int layer, ExpertPackResult *out, Err *err);

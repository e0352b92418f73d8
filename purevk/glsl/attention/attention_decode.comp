#version 450
#extension GL_GOOGLE_include_directive : enable
// Attention of few queries over many keys, as in decoding with a cache. A workgroup takes one query
// of one head, and all keys or a part of them; attention_join.comp joins the parts. LANES
// invocations side by side read a row of K and the same row of V. They read KEYS rows before they
// use the first, so that many loads are in flight.
//
// Buffers, parameters and macros: attention_io.glslh. More macros:
//   LOCAL  local size (128), a multiple of LANES and SG
//   SG     the subgroup size, a multiple of LANES: lanes add up by subgroup shuffles; 0: they do so in
//     shared memory (0)
//   SPLIT  1: out is float [B, Hq, S, splits, DV + 4], packed, from offset_o on: the weighted sum
//     of the values, then the maximum of the scores and the sum of the weights (and 2 unused), for
//     attention_join.comp
// Shared memory, bytes: (4 * VALUE_DIM + 8) * LOCAL / SG; without SG
// (4 * VALUE_DIM + 8) * LOCAL / LANES + 4 * KEYS * LOCAL.
// Grid: (S * splits, Hq, B); splits is 1 without SPLIT
#include "core/common.glslh"
#ifndef LOCAL
#define LOCAL 128
#endif
#ifndef SG
#define SG 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif

#include "attention/attention_io.glslh"
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM(26, splits)
#if SPLIT
WRITEONLY_BUFFER(OUT_BINDING, out, vec4)
#else
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
#endif
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

#define LANES 8
#define SHARES (LOCAL / LANES)
const int QUADS_K = (D4 + LANES - 1) / LANES, QUADS_V = (DV4 + LANES - 1) / LANES;
const int KEYS = max(1, min(4, 8 / max(QUADS_K, QUADS_V)));

// What is added up in shared memory in the end: the parts of subgroups, or of shares.
#if SG
#define PARTS (LOCAL / SG)
#else
#define PARTS SHARES
shared float partial_scores[KEYS * LOCAL];
#endif
shared vec4 sums[PARTS * DV4];
shared vec2 ends[PARTS];

void main() {
    begin_functions();
    int head = int(gl_WorkGroupID.y), batch = int(gl_WorkGroupID.z), key_head = head / group;
#if SPLIT
    int s = int(gl_WorkGroupID.x) / splits, part = int(gl_WorkGroupID.x) - s * splits;
#else
    int s = int(gl_WorkGroupID.x);
#endif
    ivec2 seen = keys_of(s);
    int first = seen.x, last = seen.y;
#if SPLIT
    // The parts share the keys that the query may see, by whole steps.
    int all = splits * KEYS * SHARES, size = (max(last - first, 0) + all - 1) / all * KEYS * SHARES;
    first += part * size;
    last = min(last, first + size);
#endif
    int id = int(gl_LocalInvocationIndex), share = id / LANES, lane = id - share * LANES;
    int base_q = offset_q + batch * q_batch + head * q_head + s * q_row;
    int base_k = offset_k + batch * k_batch + key_head * k_head + 4 * lane;
    int base_v = offset_v + batch * v_batch + key_head * v_head + 4 * lane;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;

    vec4 q[QUADS_K], acc[QUADS_V];
    UNROLL for (int j = 0; j < QUADS_K; j++) {
        int quad = lane + j * LANES;
        q[j] = quad < D4 ? READ4_Q(base_q + 4 * quad) : vec4(0.0);
    }
    UNROLL for (int j = 0; j < QUADS_V; j++) acc[j] = vec4(0.0);
    float highest = UNSEEN, total = 0.0;
    for (int t0 = first; t0 < last; t0 += KEYS * SHARES) {
#if BOUNDED
        // A loop of its own, since software devices run through both sides of a branch.
        while (t0 < last && !may_see(s, 1, t0, KEYS * SHARES)) t0 += KEYS * SHARES;
        if (t0 >= last) break;
#endif
        vec4 k[KEYS * QUADS_K], v[KEYS * QUADS_V];
        UNROLL for (int u = 0; u < KEYS; u++) {
            int at = base_k + min(t0 + u * SHARES + share, last - 1) * k_row;
            UNROLL for (int j = 0; j < QUADS_K; j++) {
                k[u * QUADS_K + j] = lane + j * LANES < D4 ? READ4_K(at + 4 * j * LANES) : vec4(0.0);
            }
        }
        UNROLL for (int u = 0; u < KEYS; u++) {
            int at = base_v + min(t0 + u * SHARES + share, last - 1) * v_row;
            UNROLL for (int j = 0; j < QUADS_V; j++) {
                v[u * QUADS_V + j] = lane + j * LANES < DV4 ? READ4_V(at + 4 * j * LANES) : vec4(0.0);
            }
        }
        float score[KEYS];
        float top = highest;
        UNROLL for (int u = 0; u < KEYS; u++) {
            float partial = 0.0;
            UNROLL for (int j = 0; j < QUADS_K; j++) partial += dot(q[j], k[u * QUADS_K + j]);
#if SG
            UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) partial += subgroupShuffleXor(partial, 1u << step);
            score[u] = partial;
        }
#else
            partial_scores[u * LOCAL + id] = partial;
        }
        barrier();
        UNROLL for (int u = 0; u < KEYS; u++) {
            score[u] = 0.0;
            UNROLL for (int i = 0; i < LANES; i++) score[u] += partial_scores[u * LOCAL + share * LANES + i];
        }
        barrier();
#endif
        UNROLL for (int u = 0; u < KEYS; u++) {
            int t = t0 + u * SHARES + share;
            score[u] = t < last ? masked_score(score[u], base_mask, s, t, seen) : UNSEEN;
            top = max(top, score[u]);
        }
        float shrink = weight(highest, top);
        highest = top;
        total *= shrink;
        UNROLL for (int j = 0; j < QUADS_V; j++) acc[j] *= shrink;
        UNROLL for (int u = 0; u < KEYS; u++) {
            float p = weight(score[u], top);
            total += p;
            UNROLL for (int j = 0; j < QUADS_V; j++) acc[j] += p * v[u * QUADS_V + j];
        }
    }

#if SG
    // The shares of a subgroup.
    float most = highest;
    UNROLL for (int step = 0; step < LOG2_OF(SG / LANES); step++) most = max(most, subgroupShuffleXor(most, uint(LANES) << step));
    float shrunk = weight(highest, most);
    highest = most;
    total *= shrunk;
    UNROLL for (int j = 0; j < QUADS_V; j++) acc[j] *= shrunk;
    UNROLL for (int step = 0; step < LOG2_OF(SG / LANES); step++) {
        total += subgroupShuffleXor(total, uint(LANES) << step);
        UNROLL for (int j = 0; j < QUADS_V; j++) acc[j] += subgroupShuffleXor(acc[j], uint(LANES) << step);
    }
    int own = id / SG;
    bool stores = id % SG < LANES;
#else
    int own = share;
    bool stores = true;
#endif
    if (stores) {
        if (lane == 0) ends[own] = vec2(highest, total);
        UNROLL for (int j = 0; j < QUADS_V; j++) {
            if (lane + j * LANES < DV4) sums[own * DV4 + lane + j * LANES] = acc[j];
        }
    }
    barrier();

    // The parts of the workgroup.
    float top = UNSEEN;
    for (int i = 0; i < PARTS; i++) top = max(top, ends[i].x);
    total = 0.0;
    for (int i = 0; i < PARTS; i++) total += weight(ends[i].x, top) * ends[i].y;
#if SPLIT
    int row = ((batch * int(gl_NumWorkGroups.y) + head) * S + s) * splits + part;
    int at = offset_o / 4 + row * (DV4 + 1);
    if (id == 0) buf_out[at + DV4] = vec4(top, total, 0.0, 0.0);
#else
    int at = (offset_o + batch * o_batch + head * o_head + s * o_row) / 4;
#endif
    for (int quad = id; quad < DV4; quad += LOCAL) {
        vec4 sum = vec4(0.0);
        for (int i = 0; i < PARTS; i++) sum += weight(ends[i].x, top) * sums[i * DV4 + quad];
#if SPLIT
        buf_out[at + quad] = sum;
#else
        buf_out[at + quad] = QUAD_FROM(T_OUT, (total == 0.0 ? vec4(0.0) : sum / total));
#endif
    }
}

#version 450
#extension GL_GOOGLE_include_directive : enable
// Attention of few queries over many keys, as in decoding with a cache: a workgroup takes one query of one head, and a
// share of the keys. Shares of one query are joined by attention_join.comp.
//
// Bindings, parameters and macros: attention_io.glslh. More parameters:
//   26 splits   27 keys of one split
// More macros:
//   LOCAL  local size (128), a power of two; also the keys that are scored at a time
//   SPLIT 1: out is float [B, Hq, S, splits, DV + 4], packed, from offset p24 on: the weighted sum of the values, then
//   the maximum of the scores and the sum of the weights (and 2 unused), for attention_join.comp
// Grid: (S * splits, Hq, B); splits is 1 without SPLIT
#include "common.glslh"
#ifndef LOCAL
#define LOCAL 128
#endif
#ifndef SPLIT
#define SPLIT 0
#endif

#include "attention_io.glslh"
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM_26(splits)
PARAM_27(split_size)
#if SPLIT
layout(set = 0, binding = OUT_BINDING) writeonly buffer BufOut { vec4 buf_out[]; };
#else
layout(set = 0, binding = OUT_BINDING) writeonly buffer BufOut { VEC4_OF(T_OUT) buf_out[]; };
#endif
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

// DV4 invocations side by side, each with one vec4 of the values, and as many shares of the keys as there is room for.
#if DV4 > LOCAL
#error "VALUE_DIM / 4 is more than LOCAL"
#endif
#define KEY_SHARES (LOCAL / DV4)

shared vec4 tile_q[D4];
shared float weights[LOCAL];
shared float joined[LOCAL];
shared vec4 sums[LOCAL];

void main() {
    int head = int(gl_WorkGroupID.y), batch = int(gl_WorkGroupID.z), key_head = head / group;
#if SPLIT
    int s = int(gl_WorkGroupID.x) / splits, part = int(gl_WorkGroupID.x) - s * splits;
    int first = part * split_size, last = min(T, first + split_size);
#else
    int s = int(gl_WorkGroupID.x), first = 0, last = T;
#endif
#if CAUSAL
    last = min(last, s + start + 1);
#endif
    int base_q = offset_q + batch * q_batch + head * q_head + s * q_row;
    int base_k = offset_k + batch * k_batch + key_head * k_head;
    int base_v = offset_v + batch * v_batch + key_head * v_head;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;
    int id = int(gl_LocalInvocationIndex), share = id / DV4, column = id - share * DV4;

    for (int d = id; d < D4; d += LOCAL) tile_q[d] = READ4_Q(base_q + 4 * d);
    barrier();
    vec4 acc = vec4(0.0);
    float highest = UNSEEN, total = 0.0;
    for (int t0 = first; t0 < last; t0 += LOCAL) {
        int t = t0 + id;
        float score = UNSEEN;
        if (t < last) {
            float product = 0.0;
            for (int d = 0; d < D4; d++) product += dot(tile_q[d], READ4_K(base_k + t * k_row + 4 * d));
            score = masked_score(product, base_mask, s, t);
        }
        joined[id] = score;
        barrier();
        for (int half_way = LOCAL / 2; half_way > 0; half_way /= 2) {
            if (id < half_way) joined[id] = max(joined[id], joined[id + half_way]);
            barrier();
        }
        float top = max(highest, joined[0]);
        float shrink = weight(highest, top);
        highest = top;
        acc *= shrink;
        total *= shrink;
        float p = weight(score, top);
        weights[id] = p;
        total += p;
        barrier();
        int count = min(LOCAL, last - t0);
        if (share < KEY_SHARES) {
            for (int i = share; i < count; i += KEY_SHARES) {
                acc += weights[i] * READ4_V(base_v + (t0 + i) * v_row + 4 * column);
            }
        }
        barrier();
    }
    sums[id] = acc;
    joined[id] = total;
    barrier();
    for (int half_way = LOCAL / 2; half_way > 0; half_way /= 2) {
        if (id < half_way) joined[id] += joined[id + half_way];
        barrier();
    }
    if (id >= DV4) return;
    for (int i = 1; i < KEY_SHARES; i++) acc += sums[i * DV4 + id];
#if SPLIT
    int row = ((batch * int(gl_NumWorkGroups.y) + head) * S + s) * splits + part;
    int at = offset_o / 4 + row * (DV4 + 1);
    buf_out[at + id] = acc;
    if (id == 0) buf_out[at + DV4] = vec4(highest, joined[0], 0.0, 0.0);
#else
    int at = (offset_o + batch * o_batch + head * o_head + s * o_row) / 4;
    buf_out[at + id] = VEC4_OF(T_OUT)(joined[0] == 0.0 ? vec4(0.0) : acc / joined[0]);
#endif
}

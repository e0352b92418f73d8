#version 450
#extension GL_GOOGLE_include_directive : enable
// softmax(scale * q k^T + mask) v in one pass with a running maximum, in float, by tiles in shared memory: for GPUs.
//
// Bindings, parameters and macros: attention_io.glslh. More macros:
//   QUERIES  queries a workgroup (32), a multiple of 8   KEYS  keys a step (32), a multiple of 16
// Local size 128: 8 groups of 16 invocations, each group with QUERIES / 8 queries.
// Shared memory, bytes: 4 * (QUERIES * (HEAD_DIM + 4) + KEYS * (max(HEAD_DIM, VALUE_DIM) + 4) + QUERIES * (KEYS + 4)).
// Grid: (ceil(S / QUERIES), Hq, B)
#include "common.glslh"
#ifndef QUERIES
#define QUERIES 32
#endif
#ifndef KEYS
#define KEYS 32
#endif

#include "attention_io.glslh"
layout(set = 0, binding = OUT_BINDING) writeonly buffer BufOut { VEC4_OF(T_OUT) buf_out[]; };
layout(local_size_x = 128, local_size_y = 1, local_size_z = 1) in;

#define QUERY_LINE (D4 + 1)
#if VALUE_DIM > HEAD_DIM
#define KEY_LINE (DV4 + 1)
#else
#define KEY_LINE (D4 + 1)
#endif
#define SCORE_LINE (KEYS + 4)
#define MY_QUERIES (QUERIES / 8)
#define MY_KEYS (KEYS / 16)
#define MY_VALUES ((DV4 + 15) / 16)

shared vec4 tile_q[QUERIES * QUERY_LINE];
shared vec4 tile_kv[KEYS * KEY_LINE];
shared float tile_s[QUERIES * SCORE_LINE];

void main() {
    int head = int(gl_WorkGroupID.y), batch = int(gl_WorkGroupID.z), key_head = head / group;
    int base_q = offset_q + batch * q_batch + head * q_head;
    int base_k = offset_k + batch * k_batch + key_head * k_head;
    int base_v = offset_v + batch * v_batch + key_head * v_head;
    int base_o = offset_o + batch * o_batch + head * o_head;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;
    int id = int(gl_LocalInvocationIndex), tx = id % 16, ty = id / 16;
    int row0 = int(gl_WorkGroupID.x) * QUERIES, mine = ty * MY_QUERIES;

    for (int i = id; i < QUERIES * D4; i += 128) {
        int r = i / D4, d = i - r * D4;
        tile_q[r * QUERY_LINE + d] = READ4_Q(base_q + min(row0 + r, S - 1) * q_row + 4 * d);
    }
    vec4 acc[MY_QUERIES][MY_VALUES];
    float highest[MY_QUERIES], total[MY_QUERIES];
    UNROLL for (int r = 0; r < MY_QUERIES; r++) {
        UNROLL for (int d = 0; d < MY_VALUES; d++) acc[r][d] = vec4(0.0);
        highest[r] = UNSEEN;
        total[r] = 0.0;
    }
    int keys = T;
#if CAUSAL
    keys = min(T, row0 + QUERIES + start);
#endif
    for (int t0 = 0; t0 < keys; t0 += KEYS) {
        barrier();
        for (int i = id; i < KEYS * D4; i += 128) {
            int t = i / D4, d = i - t * D4;
            tile_kv[t * KEY_LINE + d] = READ4_K(base_k + min(t0 + t, T - 1) * k_row + 4 * d);
        }
        barrier();
        float score[MY_QUERIES][MY_KEYS];
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            UNROLL for (int c = 0; c < MY_KEYS; c++) score[r][c] = 0.0;
        }
        for (int d = 0; d < D4; d++) {
            vec4 key[MY_KEYS];
            UNROLL for (int c = 0; c < MY_KEYS; c++) key[c] = tile_kv[(tx + c * 16) * KEY_LINE + d];
            UNROLL for (int r = 0; r < MY_QUERIES; r++) {
                vec4 query = tile_q[(mine + r) * QUERY_LINE + d];
                UNROLL for (int c = 0; c < MY_KEYS; c++) score[r][c] += dot(query, key[c]);
            }
        }
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            UNROLL for (int c = 0; c < MY_KEYS; c++) {
                int t = tx + c * 16;
                score[r][c] = masked_score(score[r][c], base_mask, row0 + mine + r, t0 + t);
                tile_s[(mine + r) * SCORE_LINE + t] = score[r][c];
            }
        }
        barrier();
        // The scores are there and the keys are done with: values take their place.
        for (int i = id; i < KEYS * DV4; i += 128) {
            int t = i / DV4, d = i - t * DV4;
            tile_kv[t * KEY_LINE + d] = READ4_V(base_v + min(t0 + t, T - 1) * v_row + 4 * d);
        }
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            float top = highest[r];
            for (int t = 0; t < KEYS; t++) top = max(top, tile_s[(mine + r) * SCORE_LINE + t]);
            float shrink = weight(highest[r], top);
            highest[r] = top;
            total[r] *= shrink;
            UNROLL for (int d = 0; d < MY_VALUES; d++) acc[r][d] *= shrink;
        }
        barrier();
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            UNROLL for (int c = 0; c < MY_KEYS; c++) {
                tile_s[(mine + r) * SCORE_LINE + tx + c * 16] = weight(score[r][c], highest[r]);
            }
        }
        barrier();
        for (int t = 0; t < KEYS; t++) {
            vec4 value[MY_VALUES];
            UNROLL for (int d = 0; d < MY_VALUES; d++) value[d] = tile_kv[t * KEY_LINE + min(tx + d * 16, DV4 - 1)];
            UNROLL for (int r = 0; r < MY_QUERIES; r++) {
                float p = tile_s[(mine + r) * SCORE_LINE + t];
                total[r] += p;
                UNROLL for (int d = 0; d < MY_VALUES; d++) acc[r][d] += p * value[d];
            }
        }
    }
    UNROLL for (int r = 0; r < MY_QUERIES; r++) {
        int row = row0 + mine + r;
        float over = total[r] == 0.0 ? 0.0 : 1.0 / total[r];
        UNROLL for (int d = 0; d < MY_VALUES; d++) {
            int c = tx + d * 16;
            if (row < S && c < DV4) buf_out[(base_o + row * o_row) / 4 + c] = VEC4_OF(T_OUT)(acc[r][d] * over);
        }
    }
}

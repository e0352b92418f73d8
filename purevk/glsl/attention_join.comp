#version 450
#extension GL_GOOGLE_include_directive : enable
// Joins the shares of attention_decode.comp (SPLIT 1).
//
// Bindings: 0 shares, float [B, Hq, S, splits, DV + 4], 1 out.
// Parameters: 0 S  1 DV, a multiple of 4  2 splits  3, 4, 5 stride of out: batch, head, row (multiples of 4)
//   6, 7 offset of shares, out in their buffers (0 if unset)
// Macros: T_OUT. Local size 64.
// Grid: (ceil(S * DV / 4 / 64), Hq, B)
#include "common.glslh"
#ifndef T_OUT
#define T_OUT float
#endif
PARAM_0(S)
PARAM_1(DV)
PARAM_2(splits)
PARAM_3(o_batch)
PARAM_4(o_head)
PARAM_5(o_row)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM_6(offset_shares)
PARAM_7(offset_o)

layout(set = 0, binding = 0) readonly buffer BufShares { vec4 buf_shares[]; };
layout(set = 0, binding = 1) writeonly buffer BufOut { VEC4_OF(T_OUT) buf_out[]; };
layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

void main() {
    int vectors = DV / 4, i = int(gl_GlobalInvocationID.x);
    int s = i / vectors, column = i - s * vectors;
    if (s >= S) return;
    int head = int(gl_WorkGroupID.y), batch = int(gl_WorkGroupID.z);
    int at = offset_shares / 4 + ((batch * int(gl_NumWorkGroups.y) + head) * S + s) * splits * (vectors + 1);
    float unseen = uintBitsToFloat(0xff800000u), highest = unseen;
    for (int p = 0; p < splits; p++) highest = max(highest, buf_shares[at + p * (vectors + 1) + vectors].x);
    vec4 acc = vec4(0.0);
    float total = 0.0;
    for (int p = 0; p < splits; p++) {
        vec4 end = buf_shares[at + p * (vectors + 1) + vectors];
        float scale = end.x == unseen ? 0.0 : exp(end.x - highest);
        total += scale * end.y;
        acc += scale * buf_shares[at + p * (vectors + 1) + column];
    }
    int to = (offset_o + batch * o_batch + head * o_head + s * o_row) / 4 + column;
    buf_out[to] = VEC4_OF(T_OUT)(total == 0.0 ? vec4(0.0) : acc / total);
}

#version 450
#extension GL_GOOGLE_include_directive : enable
// Rotates queries and keys, and writes keys and values to caches. Invocations go over pairs of
// elements half a head apart, for the heads of q, k and v in turn: i0 is the sequence, i1 the row, i2
// the head, i3 the element.
#include "elementwise/map.glslh"
#ifdef BARE
const int half_width = 1, start = 0, q_size_2 = 1, k_size_2 = 1, r1_size_1 = 1, i1 = 0, i2 = 0, i3 = 0;
#define Q(b, s, h, d) buf_x[d]
#define K(b, s, h, d) buf_x[d]
#define V(b, s, h, d) buf_x[d]
#define COS(s, d) buf_x[d]
#define SIN(s, d) buf_x[d]
#define INDEX(s) int(buf_x[s])
#define R_PUT(b, s, h, d, v) buf_r[d] = v
#define R1_PUT(b, s, h, d, v) buf_r[d] = v
#define R2_PUT(b, s, h, d, v) buf_r[d] = v
#endif

MAP_BEGIN
int position = pv_index(INDEX(i1), r1_size_1), head = i2, low = i3, high = i3 + half_width;
if (head < q_size_2 + k_size_2) {
    bool is_query = head < q_size_2;
    if (!is_query) head -= q_size_2;
    float a, b;
    if (is_query) { a = Q(i0, i1, head, low); b = Q(i0, i1, head, high); }
    else { a = K(i0, i1, head, low); b = K(i0, i1, head, high); }
    int row = i1 + start;
    float first = a * COS(row, low) - b * SIN(row, low);
    float second = b * COS(row, high) + a * SIN(row, high);
    if (is_query) { R_PUT(i0, i1, head, low, first); R_PUT(i0, i1, head, high, second); }
    else { R1_PUT(i0, position, head, low, first); R1_PUT(i0, position, head, high, second); }
} else {
    head -= q_size_2 + k_size_2;
    R2_PUT(i0, position, head, low, V(i0, i1, head, low));
    R2_PUT(i0, position, head, high, V(i0, i1, head, high));
}
MAP_END

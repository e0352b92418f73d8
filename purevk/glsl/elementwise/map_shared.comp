#version 450
#extension GL_GOOGLE_include_directive : enable
// Like map.comp, but the statements can use shared memory and call barrier(). Every invocation has
// work.
//
// Macros:
//   BODY    statements, which write the results
//   SHARED  declarations of shared memory
#include "elementwise/map.glslh"

#ifndef SHARED
#define SHARED shared float kept[1];
#endif
#ifndef BODY
#define BODY kept[0] = 1.0; barrier(); r = X(i0) + kept[0];
#endif

SHARED

void main() {
    uint id = MAP_ID;
    COORDINATES
    BODY
    STORE
}

//! The Fabric boundary, shaped like verbs, and its providers: verbs and sim.

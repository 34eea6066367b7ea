//! Counts repetitions of a piece of work.

use std::collections::BTreeMap;
use std::hint::black_box;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region};

/// Counts of one repetition, by name: `instructions`, `allocations`, `allocated_bytes`, `sends`,
/// ...
pub type Counts = BTreeMap<String, f64>;

/// The function whose instructions callgrind counts, with those of what it calls; the pattern
/// matches its name however the compiler decorates it.
pub const COUNTED: &str = "*costs*meter*counted*";

/// Does what is counted.
#[inline(never)]
pub fn counted(work: &mut dyn FnMut()) {
    work();
    // Not a tail call: callgrind has to see the return.
    black_box(());
}

/// Does `times` repetitions of something, in one go, and counts allocations of one of them. The
/// binary's global allocator is [`INSTRUMENTED_SYSTEM`], which costs some ten instructions per
/// allocation everywhere alike.
pub fn measure(times: usize, mut work: impl FnMut()) -> Counts {
    let region = Region::new(&INSTRUMENTED_SYSTEM);
    counted(&mut work);
    let change = region.change();
    let each = |count: usize| count as f64 / times as f64;
    // A reallocation may move: it counts as one.
    let allocations = each(change.allocations + change.reallocations);
    Counts::from([
        ("times".to_owned(), times as f64),
        ("allocations".to_owned(), allocations),
        ("allocated_bytes".to_owned(), each(change.bytes_allocated)),
    ])
}

//! Counts what repetitions of a piece of work cost.

use std::collections::BTreeMap;
use std::hint::black_box;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region};

/// Counts per repetition, by name: `instructions`, `allocations`, `allocated_bytes`, `sends` and
/// others. A scenario adds its number of repetitions as `times`, and the number of repetitions in
/// the warm-up as `warm_up`.
pub type Counts = BTreeMap<String, f64>;

/// The function whose instructions callgrind counts, including its callees. The pattern matches the
/// function's mangled name.
pub const COUNTED: &str = "*costs*meter*counted*";

/// Runs the work to be counted.
#[inline(never)]
pub fn counted(work: &mut dyn FnMut()) {
    work();
    // Prevents a tail call: callgrind must see the return.
    black_box(());
}

/// Counts the allocations of `work`, which performs `times` repetitions. The program's global
/// allocator must be [`INSTRUMENTED_SYSTEM`], which adds about ten instructions to every
/// allocation.
pub fn measure(times: usize, mut work: impl FnMut()) -> Counts {
    let region = Region::new(&INSTRUMENTED_SYSTEM);
    counted(&mut work);
    let change = region.change();
    let each = |count: usize| count as f64 / times as f64;
    // A reallocation may move the memory, so it counts as an allocation.
    let allocations = each(change.allocations + change.reallocations);
    Counts::from([
        ("times".to_owned(), times as f64),
        ("allocations".to_owned(), allocations),
        ("allocated_bytes".to_owned(), each(change.bytes_allocated)),
    ])
}

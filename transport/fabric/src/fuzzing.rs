//! Entry points of the fuzz targets. Not part of the public interface.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::shm::ring::{Reader, Shape};

/// Reads a ring whose memory holds anything, and is written to between any two steps.
pub fn read_ring(contents: &[u64], pokes: &[(u16, u64)]) {
    let shape = Shape { slots: 4, slot_size: 64 };
    let words = shape.bytes() / 8;
    let memory: Vec<AtomicU64> =
        (0..words).map(|n| AtomicU64::new(contents.get(n).copied().unwrap_or(0))).collect();
    let memory = std::sync::Arc::new(memory);
    let Some(mut reader) = Reader::new(Shared(memory.clone()), shape) else { return };
    let mut out = [0; 64];
    for (at, value) in pokes {
        match reader.next() {
            Ok(Some(message)) => {
                assert!(message.slot < shape.slots && message.len <= shape.slot_size);
                message.copy_to(&mut out[..message.len as usize]);
            }
            Ok(None) => {
                let _ = reader.wait();
                reader.awake();
            }
            // The link would end here.
            Err(_) => return,
        }
        if value % 3 == 0 {
            reader.free(|slot| u64::from(slot) != value % 5);
        }
        memory[usize::from(*at) % words].store(*value, Ordering::Relaxed);
    }
}

struct Shared(std::sync::Arc<Vec<AtomicU64>>);

impl crate::shm::ring::Words for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

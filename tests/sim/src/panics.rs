//! Collects the panics of a run.

use std::cell::RefCell;
use std::sync::Once;

thread_local! {
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// The panics of this thread, including those in tasks, which tokio catches.
pub(crate) struct Panics;

impl Panics {
    /// Starts to collect the panics of this thread.
    pub(crate) fn capture() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let default_hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let captured = PANICS.with(|panics| match &mut *panics.borrow_mut() {
                    Some(panics) => {
                        panics.push(format!("panic: {info}"));
                        true
                    }
                    None => false,
                });
                if !captured {
                    default_hook(info);
                }
            }));
        });
        PANICS.with(|panics| *panics.borrow_mut() = Some(Vec::new()));
        Panics
    }

    /// Stops collecting, and returns the collected panics.
    pub(crate) fn take(self) -> Vec<String> {
        PANICS.with(|panics| panics.borrow_mut().take()).unwrap_or_default()
    }
}

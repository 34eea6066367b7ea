//! An application buffer in which a message field lands.
//!
//! | file | what |
//! |---|---|
//! | `target` | the call's side: claims the buffer, and tells what has become of it |
//! | `outcome` | what has become of a buffer |

mod outcome;
mod target;

pub use self::outcome::{Outcome, WhyCopied, WhyEmpty};
pub use self::target::{Claimed, Target};

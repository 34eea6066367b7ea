//! An application buffer in which a message field lands.
//!
//! | file | what |
//! |---|---|
//! | `target` | the call's side: claims the buffer, and reports its outcome |
//! | `outcome` | what the buffer holds after its call |

mod outcome;
mod target;

pub use self::outcome::{Outcome, WhyCopied, WhyEmpty};
pub use self::target::{Claimed, Target};

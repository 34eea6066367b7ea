//! Bugs of the fabric itself, which no device has. Tests inject them to see that the checkers find
//! them.

/// A promise of the fabric that is broken once, or permanently where stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InjectedBug {
    /// From one completion on, no completion of that link is reported.
    LoseCompletions,
    /// A byte of a WRITE changes on its way.
    FlipWrite,
    /// The last byte of a SEND changes on its way.
    FlipSend,
    /// A WRITE lands after the SEND that follows it.
    LateWrite,
    /// A WRITE lands, and lands again after the SEND that follows it.
    RepeatWrite,
    /// A SEND is reported as done but does not arrive.
    LoseSend,
    /// A SEND arrives twice.
    RepeatSend,
    /// A RECV that is posted again is forgotten.
    LoseRepost,
    /// A registration is not ended.
    KeepRegistration,
    /// A lease is returned while its memory is read.
    ReturnEarly,
}

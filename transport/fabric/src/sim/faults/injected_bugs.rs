//! Bugs of the fabric itself, which no device has. Tests inject them to verify that the checkers
//! find them.

/// A bug that breaks a promise of the fabric once, or permanently where stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InjectedBug {
    /// From one completion on, the link reports no completions.
    LoseCompletions,
    /// A byte of a WRITE changes in transit.
    FlipWrite,
    /// The last byte of a SEND changes in transit.
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

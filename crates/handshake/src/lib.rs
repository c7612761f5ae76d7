//! Geometry envelopes, their comparison, verdicts and wire form.
//!
//! An [`Envelope`] states what an engine stores where. [`compare`] puts two of them side by side and
//! gives a [`Verdict`] that names every difference at once. No I/O, no unsafe, no clock.

#![forbid(unsafe_code)]

mod catalogue;
mod element;
mod envelope;
mod transfer;
mod verdict;

pub use catalogue::{Area, Code, Entry, Retry};
pub use element::{Element, UnknownElement};
pub use envelope::{
    Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Role, Scales,
    Strides, Unit,
};
pub use transfer::{ABSENT, PageLists, Ready, TokenRange};
pub use verdict::{Mismatch, Outcome, Policy, Verdict};

//! Geometry envelopes, their comparison, verdicts and wire form.
//!
//! An [`Envelope`] states what an engine stores where. [`compare`] puts two of them side by side and
//! gives a [`Verdict`] that names every difference at once. No I/O, no unsafe, no clock.

#![forbid(unsafe_code)]

mod catalogue;
mod compare;
mod convert;
mod element;
mod envelope;
mod errors_page;
mod file;
mod launch;
mod layout;
pub mod limits;
mod nearest;
mod render;
mod shape;
mod spans;
mod transfer;
mod validate;
mod verdict;
mod versions;
mod wire;

pub use catalogue::{Area, Code, Entry, Retry};
pub use compare::compare;
pub use convert::{ConvertError, ConvertOptions, Converted, Framework, MAX_CONFIG, Note, convert};
pub use element::{Element, UnknownElement};
pub use envelope::{
    Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Role, Scales,
    Strides, Unit,
};
pub use errors_page::errors_page;
pub use file::{FileError, FileProblem, MAX_ENVELOPE_FILE};
pub use launch::{Allocation, Arrangement, Launch, LaunchError, Order, Padding, Stages};
pub use layout::layout_label;
pub use nearest::edits;
pub use render::{Numbered, wrap};
pub use shape::{Cached, ModelShape};
pub use spans::spans;
pub use transfer::{ABSENT, PageLists, Ready, TokenRange};
pub use validate::{EnvelopeFault, InvalidEnvelope};
pub use verdict::{Mismatch, Outcome, Policy, Verdict};
pub use versions::{NoCommonVersion, Versions};
pub use wire::{FRAME_HEADER, Frames, MAX_ENVELOPE, MAX_PAYLOAD, WireError, decode, encode, frame};

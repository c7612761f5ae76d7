//! The verdict on a pair: the comparison of the envelopes, and the planner's proof.

use kvferry_handshake::{Envelope, Policy, Verdict};

use crate::LinkPlan;

/// The verdict that `kvferry check` and both daemons use: the comparison of the envelopes, and the
/// planner's proof. The plan comes with it where the verdict allows a link.
pub fn judge(prefill: &Envelope, decode: &Envelope, policy: Policy) -> (Verdict, Option<LinkPlan>) {
    let _ = (prefill, decode, policy);
    todo!()
}

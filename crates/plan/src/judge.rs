//! The verdict on a pair: the comparison of the envelopes, and the planner's proof.

use kvferry_handshake::{Code, Envelope, Mismatch, Outcome, Policy, Verdict, compare};

use crate::LinkPlan;

/// The verdict that `kvferry check` and both daemons use: the comparison of the envelopes, and the
/// planner's proof. The plan comes with it where the verdict allows a link.
pub fn judge(prefill: &Envelope, decode: &Envelope, policy: Policy) -> (Verdict, Option<LinkPlan>) {
    let mut verdict = compare(prefill, decode, policy);
    match LinkPlan::new(prefill, decode) {
        Ok(plan) => {
            let plan = verdict.allows().then_some(plan);
            (verdict, plan)
        }
        Err(found) => {
            let compared = std::mem::take(&mut verdict.mismatches);
            let more = found
                .into_iter()
                .filter(|found| adds(&compared, found))
                .collect::<Vec<_>>();
            verdict.mismatches = compared;
            verdict.mismatches.extend(more);
            verdict.outcome = Outcome::Refused;
            (verdict, None)
        }
    }
}

/// Whether what the planner found says more than the comparison did. Where the comparison allows the pair,
/// it always does; where heads, layers or components differ anyway, that they are not covered follows.
fn adds(compared: &[Mismatch], found: &Mismatch) -> bool {
    if compared.is_empty() {
        return true;
    }
    let component = |field: &str| field.split('.').nth(1).map(str::to_owned);
    let coverage = matches!(
        found.code,
        Code::HeadCoverage | Code::LayerCoverage | Code::PartCoverage | Code::TokenCoverage
    );
    let follows = compared.iter().any(|mismatch| {
        let same = component(&mismatch.field) == component(&found.field);
        same && matches!(mismatch.code, Code::Components | Code::Parts | Code::Layers)
    });
    coverage && !follows
}

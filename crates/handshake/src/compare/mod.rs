//! The comparison of two envelopes: every difference at once, and what policy makes of it.
//!
//! The verdict depends on nothing but the two envelopes and the policy, and not on the order in which
//! an envelope lists its components, parts or page groups: both daemons compute it and must agree. It is not
//! symmetric: roles and decode context parallelism have a direction.
//!
//! Whether the prefill ranks together hold every layer, head and token that the decode ranks want is the
//! planner's proof (`kvferry_plan::judge`); here only what both sides *state* is compared.

mod component;
mod engine;
mod page_groups;

use crate::catalogue::Code;
use crate::envelope::Envelope;
use crate::verdict::{Mismatch, Outcome, Policy, Verdict};

/// Compares a prefill engine's envelope with a decode engine's. Both have to be valid.
pub fn compare(prefill: &Envelope, decode: &Envelope, policy: Policy) -> Verdict {
    let mut differences = Differences::default();
    engine::roles(prefill, decode, &mut differences);
    engine::model(prefill, decode, &mut differences);
    engine::prefill_context_parallel(prefill, decode, &mut differences);
    component::all(prefill, decode, &mut differences);
    page_groups::page_sizes(prefill, decode, &mut differences);
    page_groups::composition(prefill, decode, &mut differences);
    differences.judge(policy)
}

/// What a difference costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gravity {
    /// No policy carries it.
    Refused,
    /// The planner carries it exactly, where policy allows.
    Bridgeable,
    /// It could not be compared.
    Warning,
}

#[derive(Default)]
struct Differences {
    found: Vec<(Gravity, Mismatch)>,
}

/// A difference as it is found; fixes come from the catalogue unless there is a better one.
struct Difference {
    gravity: Gravity,
    code: Code,
    field: String,
    prefill: String,
    decode: String,
    why: String,
}

impl Differences {
    fn add(&mut self, difference: Difference) {
        let fix = difference.code.entry().fix.to_owned();
        self.add_with_fix(difference, fix);
    }

    /// With another fix than the catalogue's, where there is one.
    fn add_with(&mut self, fix: Option<&str>, difference: Difference) {
        let fix = fix.unwrap_or(difference.code.entry().fix).to_owned();
        self.add_with_fix(difference, fix);
    }

    fn add_with_fix(&mut self, difference: Difference, fix: String) {
        self.found.push((
            difference.gravity,
            Mismatch {
                code: difference.code,
                field: difference.field,
                prefill: difference.prefill,
                decode: difference.decode,
                why: difference.why,
                fix,
            },
        ));
    }

    fn judge(self, policy: Policy) -> Verdict {
        let mut verdict = Verdict {
            outcome: Outcome::Compatible,
            policy,
            mismatches: Vec::new(),
            bridged: Vec::new(),
            warnings: Vec::new(),
        };
        for (gravity, mut mismatch) in self.found {
            if (gravity, policy) != (Gravity::Bridgeable, Policy::Strict)
                && let Some((fix, _)) = mismatch.fix.split_once(BRIDGING)
            {
                // Advice to allow what is allowed already, or what allowing would not mend.
                mismatch.fix = format!("{fix}.");
            }
            match (gravity, policy) {
                (Gravity::Warning, _) => verdict.warnings.push(mismatch),
                (Gravity::Bridgeable, Policy::Bridge) => verdict.bridged.push(mismatch),
                (Gravity::Bridgeable | Gravity::Refused, _) => verdict.mismatches.push(mismatch),
            }
        }
        verdict.outcome = if !verdict.mismatches.is_empty() {
            Outcome::Refused
        } else if !verdict.bridged.is_empty() {
            Outcome::Bridgeable
        } else {
            Outcome::Compatible
        };
        verdict
    }
}

/// Where a catalogue entry's fix begins to tell of bridging.
const BRIDGING: &str = ", or allow bridging";

/// How an absent value is written.
const NOT_STATED: &str = "not stated";

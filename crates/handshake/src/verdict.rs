//! Verdicts: what two envelopes make of each other.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::catalogue::Code;

/// What an operator allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Page size, element type, layout, DCP geometry, components, layers and model must agree.
    #[default]
    Strict,
    /// Unequal page sizes, orders and DCP are carried where the planner proves that it can.
    Bridge,
}

/// The outcome of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The pair agrees.
    Compatible,
    /// The pair differs only in what the planner can carry exactly, and policy allows it.
    Bridgeable,
    /// The pair must not be linked.
    Refused,
}

/// One field in which a pair differs (or that cannot be compared).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Stable code; `kvferry explain CODE` says more.
    pub code: Code,
    /// The field, as a path into the envelope file: `component.kv.element`.
    pub field: String,
    /// The prefill side's value.
    pub prefill: String,
    /// The decode side's value.
    pub decode: String,
    /// Why carrying it would corrupt.
    pub why: String,
    /// What to set, naming SGLang's and vLLM's flag where there is one.
    pub fix: String,
}

/// What two envelopes make of each other under a policy. Both daemons compute it; they must agree ([`Verdict::agrees`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The outcome.
    pub outcome: Outcome,
    /// The policy it was computed under: the stricter of both operators'.
    pub policy: Policy,
    /// Every reason to refuse; empty unless refused.
    pub mismatches: Vec<Mismatch>,
    /// Every difference that policy lets the planner bridge; the pair is linked only if nothing else differs.
    pub bridged: Vec<Mismatch>,
    /// What could not be compared, by name.
    pub warnings: Vec<Mismatch>,
}

impl Policy {
    /// The stricter of two operators' policies.
    pub fn stricter(self, other: Policy) -> Policy {
        self.min(other)
    }
}

impl Verdict {
    /// Whether the pair may be linked.
    pub fn allows(&self) -> bool {
        self.outcome != Outcome::Refused
    }

    /// Whether both verdicts decide alike: the same outcome under the same policy, for the same codes and
    /// fields. Wording and warnings may differ, as they do between releases.
    pub fn agrees(&self, other: &Verdict) -> bool {
        fn decisive(mismatches: &[Mismatch]) -> impl Iterator<Item = (Code, &str)> {
            mismatches
                .iter()
                .map(|mismatch| (mismatch.code, mismatch.field.as_str()))
        }
        self.outcome == other.outcome
            && self.policy == other.policy
            && decisive(&self.mismatches).eq(decisive(&other.mismatches))
            && decisive(&self.bridged).eq(decisive(&other.bridged))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Policy::Strict => "strict",
            Policy::Bridge => "bridge",
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Compatible => "compatible",
            Outcome::Bridgeable => "bridgeable",
            Outcome::Refused => "refused",
        })
    }
}

//! Which engines these are: roles, the model they serve, and how the prompt is split.

use super::{Difference, Differences, Gravity, NOT_STATED};
use crate::catalogue::Code;
use crate::envelope::{Envelope, Role};

pub(super) fn roles(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let (source, target) = (prefill.identity.role, decode.identity.role);
    if source == Role::Decode || target == Role::Prefill {
        found.add(Difference {
            gravity: Gravity::Refused,
            code: Code::Role,
            field: "role".to_owned(),
            prefill: source.to_string(),
            decode: target.to_string(),
            why: "pages travel from an engine that computes prompts to one that generates; a decode engine \
                  publishes nothing, and a prefill engine fetches nothing"
                .to_owned(),
        });
    }
}

/// The model. Equal weight digests override names and revisions, which are often paths.
pub(super) fn model(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let (p, d) = (&prefill.identity, &decode.identity);
    let digests = stated(
        found,
        Code::Model,
        "weights_digest",
        [&p.weights_digest, &d.weights_digest],
        "keys and values of other weights mean nothing to the decode side: it would generate from noise",
    );
    if digests != Some(true) {
        if p.model != d.model {
            found.add(Difference {
                gravity: Gravity::Refused,
                code: Code::Model,
                field: "model".to_owned(),
                prefill: p.model.clone(),
                decode: d.model.clone(),
                why:
                    "keys and values of another model mean nothing to the decode side, even where the shapes \
                      agree"
                        .to_owned(),
            });
        }
        stated(
            found,
            Code::Revision,
            "revision",
            [&p.revision, &d.revision],
            "another revision has other weights: the decode side would attend to keys that its own weights \
             would not have made",
        );
    }
    stated(
        found,
        Code::ConfigDigest,
        "config_digest",
        [&p.config_digest, &d.config_digest],
        "keys are rotated by the configuration's RoPE: with another one every position is wrong",
    );
}

/// Compares an optional statement. `Some` when both sides make it: whether they agree.
fn stated(
    found: &mut Differences,
    code: Code,
    field: &str,
    values: [&Option<String>; 2],
    why: &str,
) -> Option<bool> {
    let said = |value: &Option<String>| value.clone().unwrap_or_else(|| NOT_STATED.to_owned());
    let difference = |gravity, code, why: &str| Difference {
        gravity,
        code,
        field: field.to_owned(),
        prefill: said(values[0]),
        decode: said(values[1]),
        why: why.to_owned(),
    };
    match values {
        [None, None] => None,
        [Some(p), Some(d)] if p == d => Some(true),
        [Some(_), Some(_)] => {
            found.add(difference(Gravity::Refused, code, why));
            Some(false)
        }
        [Some(_), None] | [None, Some(_)] => {
            let why = "only one side states it, so it was not compared";
            found.add(difference(Gravity::Warning, Code::NotCompared, why));
            None
        }
    }
}

/// Decode context parallelism on either side needs a prefill context-parallel size of 1 on both.
///
/// Without DCP a prefill context-parallel size above 1 is no obstacle, equal or not: every rank then
/// holds all tokens (that is what a DCP size of 1 states), and only the computation is split.
pub(super) fn prefill_context_parallel(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let sizes = [prefill, decode].map(|side| side.identity.prefill_context_parallel);
    let dcp = [prefill, decode].map(|side| side.components.iter().map(|c| c.dcp.size).max().unwrap_or(1));
    if sizes.iter().all(|size| *size == 1) || dcp.iter().all(|size| *size == 1) {
        return;
    }
    let said = |side: usize| format!("{} (with a DCP size of {})", sizes[side], dcp[side]);
    found.add(Difference {
        gravity: Gravity::Refused,
        code: Code::PrefillContextParallel,
        field: "prefill_context_parallel".to_owned(),
        prefill: said(0),
        decode: said(1),
        why:
            "prefill context parallelism splits the prompt over ranks in an order of its own; together with \
              DCP nothing states which rank then holds which token"
                .to_owned(),
    });
}

//! From an envelope to its file.

use std::fmt::Write;

use crate::element::Element;
use crate::envelope::{Component, Envelope, Identity, Kind, Placement, Rank, Scales, Unit};
use crate::launch::{Arrangement, Order, Padding};
use crate::spans::spans;

/// The file with every rank's placements.
pub(super) fn explicit(envelope: &Envelope) -> String {
    let mut out = String::new();
    identity(&mut out, &envelope.identity);
    declared(&mut out, envelope);
    for rank in &envelope.ranks {
        self::rank(&mut out, envelope, rank);
    }
    out
}

/// The file with an arrangement in place of the ranks, and `notes` as comments before it.
pub(super) fn arranged(envelope: &Envelope, arrangement: &Arrangement, notes: &[String]) -> String {
    let mut out = String::new();
    for note in notes {
        for line in note.lines() {
            put(&mut out, format_args!("# {line}\n"));
        }
    }
    if !notes.is_empty() {
        out.push('\n');
    }
    identity(&mut out, &envelope.identity);
    declared(&mut out, envelope);
    let Arrangement {
        tp,
        cp,
        stages,
        order,
        allocation,
        padding,
    } = arrangement;
    let stages: Vec<String> = stages.iter().map(u32::to_string).collect();
    put(
        &mut out,
        format_args!(
            "\n[arrangement]\ntp = {tp}\ncp = {cp}\nstages = [{}]\n",
            stages.join(", ")
        ),
    );
    let order = match order {
        Order::Nhd => "NHD",
        Order::Hnd => "HND",
    };
    let allocation = allocation.name();
    put(
        &mut out,
        format_args!("order = \"{order}\"\nallocation = \"{allocation}\"\n"),
    );
    if *padding != Padding::default() {
        let Padding { row, page, start } = padding;
        put(
            &mut out,
            format_args!("padding = {{ row = {row}, page = {page}, start = {start} }}\n"),
        );
    }
    out
}

/// Writing to a string does not fail.
fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

/// A string as TOML writes it.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn identity(out: &mut String, identity: &Identity) {
    put(
        out,
        format_args!(
            "engine = {}\nrole = \"{}\"\n",
            quoted(&identity.engine),
            identity.role
        ),
    );
    if identity.incarnation != 0 {
        put(
            out,
            format_args!("incarnation = \"{:016x}\"\n", identity.incarnation),
        );
    }
    put(out, format_args!("model = {}\n", quoted(&identity.model)));
    for (key, value) in [
        ("revision", &identity.revision),
        ("weights_digest", &identity.weights_digest),
        ("config_digest", &identity.config_digest),
    ] {
        if let Some(value) = value {
            put(out, format_args!("{key} = {}\n", quoted(value)));
        }
    }
    put(
        out,
        format_args!(
            "framework = {}\nframework_version = {}\nprefill_context_parallel = {}\n",
            quoted(&identity.framework),
            quoted(&identity.framework_version),
            identity.prefill_context_parallel
        ),
    );
}

fn declared(out: &mut String, envelope: &Envelope) {
    for (at, group) in envelope.page_groups.iter().enumerate() {
        put(
            out,
            format_args!(
                "\n[[page_group]]\nname = {}\npage_size = {}\npool_pages = {}\n",
                quoted(&group.name),
                group.page_size,
                group.pool_pages
            ),
        );
        if usize::from(group.pool) != at {
            let pool = &envelope.page_groups[usize::from(group.pool)].name;
            put(out, format_args!("pool = {}\n", quoted(pool)));
        }
    }
    for component in &envelope.components {
        self::component(out, envelope, component);
    }
}

fn component(out: &mut String, envelope: &Envelope, component: &Component) {
    let group = &envelope.page_groups[usize::from(component.page_group)].name;
    put(
        out,
        format_args!(
            "\n[[component]]\nname = {}\nkind = \"{}\"\npage_group = {}\nlayers = \"{}\"\nparts = [\n",
            quoted(&component.name),
            component.kind,
            quoted(group),
            spans(&component.layers)
        ),
    );
    for part in &component.parts {
        put(
            out,
            format_args!(
                "    {{ name = {}, heads = {}, width = {} }},\n",
                quoted(&part.name),
                part.heads,
                part.width
            ),
        );
    }
    put(out, format_args!("]\nelement = \"{}\"\n", component.element));
    match &component.scales {
        Scales::None if matches!(component.element, Element::Bf16 | Element::Fp16 | Element::Fp32) => {}
        Scales::Component(name) => put(out, format_args!("scales = {{ component = {} }}\n", quoted(name))),
        other => put(out, format_args!("scales = \"{other}\"\n")),
    }
    let usual = if component.kind == Kind::State {
        Unit::Slot
    } else {
        Unit::Token
    };
    if component.unit != usual {
        put(out, format_args!("unit = \"{}\"\n", component.unit));
    }
    if let Some(tag) = &component.opaque {
        put(out, format_args!("opaque = {}\n", quoted(tag)));
    }
    if let Some(window) = component.window {
        put(out, format_args!("window = {window}\n"));
    }
    let dcp = component.dcp;
    if dcp != crate::envelope::Dcp::NONE {
        put(
            out,
            format_args!(
                "dcp = {{ size = {}, interleave = {} }}\n",
                dcp.size, dcp.interleave
            ),
        );
    }
}

fn rank(out: &mut String, envelope: &Envelope, rank: &Rank) {
    put(
        out,
        format_args!(
            "\n[[rank]]\nrank = {}\ndcp_rank = {}\nplacement = [\n",
            rank.rank, rank.dcp_rank
        ),
    );
    for placement in &rank.placements {
        self::placement(out, envelope, placement);
    }
    out.push_str("]\n");
}

fn placement(out: &mut String, envelope: &Envelope, placement: &Placement) {
    let component = &envelope.components[usize::from(placement.component)];
    let parts: Vec<String> = placement
        .parts
        .iter()
        .map(|part| quoted(&component.parts[usize::from(*part)].name))
        .collect();
    let strides = placement.strides;
    let strides: Vec<String> = [
        ("page", strides.page),
        ("token", strides.token),
        ("head", strides.head),
        ("part", strides.part),
        ("layer", strides.layer),
    ]
    .iter()
    .filter(|(_, stride)| *stride != 0)
    .map(|(axis, stride)| format!("{axis} = {stride}"))
    .collect();
    put(
        out,
        format_args!(
            "    {{ component = {}, layers = \"{}\", parts = [{}], heads = \"{}\", region = {}, offset = {}, strides = {{ {} }} }},\n",
            quoted(&component.name),
            spans(&placement.layers),
            parts.join(", "),
            placement.heads,
            placement.region,
            placement.offset,
            strides.join(", ")
        ),
    );
}

//! Element types, resolved: two names of one type are one value, and `auto` is none of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The type of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Element {
    /// Not resolved: the engine was told `auto`. Always refused.
    Auto,
    /// IEEE single.
    Fp32,
    /// IEEE half.
    Fp16,
    /// bfloat16.
    Bf16,
    /// OCP FP8 E4M3 (finite, NaN only).
    Fp8E4m3,
    /// OCP FP8 E5M2.
    Fp8E5m2,
    /// FP8 E4M3 FNUZ (AMD MI300).
    Fp8E4m3Fnuz,
    /// FP8 E5M2 FNUZ (AMD MI300).
    Fp8E5m2Fnuz,
    /// OCP FP4 E2M1, two to a byte.
    Fp4E2m1,
    /// Signed byte.
    Int8,
    /// Unsigned byte.
    Uint8,
}

/// A name that is no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no element type{}; known: {}", hint(name), known())]
pub struct UnknownElement {
    /// The name.
    pub name: String,
}

/// The first name of each type is the one printed.
const NAMES: &[(Element, &[&str])] = &[
    (Element::Auto, &["auto"]),
    (Element::Fp32, &["fp32", "float32", "float"]),
    (Element::Fp16, &["fp16", "float16", "half"]),
    (Element::Bf16, &["bf16", "bfloat16"]),
    (Element::Fp8E4m3, &["fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"]),
    (Element::Fp8E5m2, &["fp8_e5m2", "float8_e5m2"]),
    (Element::Fp8E4m3Fnuz, &["fp8_e4m3fnuz", "float8_e4m3fnuz"]),
    (Element::Fp8E5m2Fnuz, &["fp8_e5m2fnuz", "float8_e5m2fnuz"]),
    (Element::Fp4E2m1, &["fp4_e2m1", "float4_e2m1fn_x2"]),
    (Element::Int8, &["int8"]),
    (Element::Uint8, &["uint8"]),
];

/// What a name that frameworks use was meant to be.
fn hint(name: &str) -> &'static str {
    match name {
        "fp8" => " by itself; both frameworks mean fp8_e4m3 by it",
        _ => "",
    }
}

fn known() -> String {
    let names: Vec<&str> = NAMES.iter().map(|(_, names)| names[0]).collect();
    names.join(", ")
}

impl Element {
    /// Bits of one element; 0 for [`Element::Auto`].
    pub fn bits(self) -> u32 {
        match self {
            Element::Auto => 0,
            Element::Fp4E2m1 => 4,
            Element::Fp8E4m3
            | Element::Fp8E5m2
            | Element::Fp8E4m3Fnuz
            | Element::Fp8E5m2Fnuz
            | Element::Int8
            | Element::Uint8 => 8,
            Element::Fp16 | Element::Bf16 => 16,
            Element::Fp32 => 32,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = NAMES.iter().find(|(element, _)| element == self);
        f.write_str(row.map_or("?", |(_, names)| names[0]))
    }
}

impl FromStr for Element {
    type Err = UnknownElement;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let name = name.trim().to_ascii_lowercase();
        let name = name.strip_prefix("torch.").unwrap_or(&name);
        let row = NAMES.iter().find(|(_, names)| names.contains(&name));
        row.map(|(element, _)| *element).ok_or_else(|| UnknownElement {
            name: name.to_owned(),
        })
    }
}

//! Names the first field in which two envelopes of one engine differ.

use kvferry_handshake::Envelope;
use serde_json::Value;

/// Longest value that is shown, in characters.
const SHOWN: usize = 100;

/// The field, as envelope files name it, and both values.
pub(crate) fn first_difference(ours: &Envelope, theirs: &Envelope) -> String {
    match (serde_json::to_value(ours), serde_json::to_value(theirs)) {
        (Ok(ours), Ok(theirs)) => differing("", &ours, &theirs),
        _ => None,
    }
    .unwrap_or_else(|| "they are equal".to_owned())
}

/// An envelope is only a few levels deep.
fn differing(path: &str, ours: &Value, theirs: &Value) -> Option<String> {
    let within = |name: &str| match path {
        "" => name.to_owned(),
        _ => format!("{path}.{name}"),
    };
    match (ours, theirs) {
        _ if ours == theirs => None,
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => a
            .iter()
            .find_map(|(name, value)| differing(&within(name), value, b.get(name)?)),
        // Of two variants, the names are what differs.
        (Value::Object(a), Value::Object(b)) => {
            let names = |map: &serde_json::Map<String, Value>| {
                let names: Vec<&str> = map.keys().map(String::as_str).collect();
                names.join(" ")
            };
            Some(format!("{path}: {} against {}", names(a), names(b)))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(at, (a, b))| differing(&within(&at.to_string()), a, b)),
        _ => Some(format!("{path}: {} against {}", shown(ours), shown(theirs))),
    }
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "not stated".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => map.keys().next().cloned().unwrap_or_default(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::{Launch, ModelShape};

    use super::first_difference;

    #[test]
    fn the_field_is_named_with_both_values_and_no_more() {
        let model = ModelShape::new("model", 2).latent(0..2, 8);
        let ours = Launch::default().envelope(&model).unwrap();
        let told = |change: fn(&mut kvferry_handshake::Envelope)| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            first_difference(&ours, &theirs)
        };
        assert_eq!(
            told(|theirs| theirs.components[0].parts[0].width = 64),
            "components.0.parts.0.width: 8 against 64"
        );
        assert_eq!(
            told(|theirs| theirs.identity.revision = Some("main".to_owned())),
            "identity.revision: not stated against main"
        );
        assert_eq!(
            told(|theirs| theirs.components.clear()),
            "components: a list of 1 against a list of 0"
        );
        let long = told(|theirs| theirs.identity.model = "m".repeat(5000));
        assert!(long.len() < 200, "{long}");
    }
}

//! Which key a place in a file belongs to: the parser tells a place and what it expected there, not the key.

/// The path of the key whose value holds byte `at`: the table's name, then keys within. Empty before the first key.
/// Of a place that is a key itself, the path of what it is in.
pub(super) fn key_at(text: &str, at: usize) -> String {
    let mut table = String::new();
    // The key at each depth of brackets.
    let mut keys = vec![String::new()];
    let mut word = String::new();
    let mut quote = None;
    let mut comment = false;
    let mut places = text
        .char_indices()
        .take_while(|(place, _)| *place < at)
        .peekable();
    while let Some((place, c)) = places.next() {
        if let Some(open) = quote {
            match c {
                '\\' if open == '"' => drop(places.next()),
                _ if c == open || c == '\n' => quote = None,
                _ => word.push(c),
            }
            continue;
        }
        let depth = keys.len();
        match c {
            '\n' => {
                comment = false;
                word.clear();
                if depth == 1 {
                    keys[0].clear();
                }
            }
            _ if comment => {}
            '#' => comment = true,
            '"' | '\'' => quote = Some(c),
            '[' if depth == 1 && keys[0].is_empty() => {
                // A table's header: whole, since a place in it means the table.
                let header = text[place..].lines().next().unwrap_or_default();
                table = header.split('#').next().unwrap_or_default().trim().to_owned();
                table.retain(|c| c != '[' && c != ']' && c != ' ');
                comment = true;
            }
            '[' | '{' => {
                keys.push(String::new());
                word.clear();
            }
            ']' | '}' if depth > 1 => drop(keys.pop()),
            ',' => {
                keys[depth - 1].clear();
                word.clear();
            }
            '=' => keys[depth - 1] = std::mem::take(&mut word),
            _ if c.is_whitespace() => {}
            _ => word.push(c),
        }
    }
    let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
    if after.starts_with('[') && (before.is_empty() || before.ends_with('\n')) {
        return key_at(text, at + 1);
    }
    let path = [table].into_iter().chain(keys);
    let path: Vec<String> = path.filter(|key| !key.is_empty()).collect();
    path.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "engine = \"e=[\"\nrole = 3 # a = \"b\nlist = [1, 22]\n[[page_group]] # x\nname = 'n'\n\
        parts = [\n  { name = \"k\", heads = 7 },\n  { width = 8, next = 9 },\n]\nlast = { inner = { most = 10 } }\n\
        [[rank.placement]]\nregion = 11\n";

    #[test]
    fn a_value_has_the_path_of_its_key() {
        for (value, path) in [
            ("\"e=", "engine"),
            ("3 #", "role"),
            ("22", "list"),
            ("'n'", "page_group.name"),
            ("\"k\"", "page_group.parts.name"),
            ("7 }", "page_group.parts.heads"),
            ("8,", "page_group.parts.width"),
            ("9 }", "page_group.parts.next"),
            ("10 ", "page_group.last.inner.most"),
            ("11", "rank.placement.region"),
            ("engine", ""),
            ("[[rank", "rank.placement"),
            ("[rank", "rank.placement"),
        ] {
            assert_eq!(key_at(TEXT, TEXT.find(value).unwrap()), path, "{value}");
        }
        assert_eq!(key_at("[[a]]", 0), "a");
        assert_eq!(key_at("\u{e9}=[", 100), "\u{e9}");
    }
}

//! Text as an operator reads it: labelled, wrapped lines, and numbers with units.

use std::io::{self, Write};

use kvferry_handshake::wrap;

const LABEL: usize = 9;
const WIDTH: usize = 100;

/// Writes `    label    text`, wrapped, with further lines under the text.
pub(crate) fn labelled(out: &mut impl Write, label: &str, text: &str) -> io::Result<()> {
    let indent = 4 + LABEL;
    let mut head = format!("    {label:<LABEL$}");
    for line in wrap(text, WIDTH - indent) {
        writeln!(out, "{head}{line}")?;
        head = " ".repeat(indent);
    }
    Ok(())
}

/// `1 page`, `2 pages`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    let plural = match noun {
        _ if count == 1 => "",
        _ if noun.ends_with("ch") || noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{plural}")
}

/// Bytes in the largest binary unit that keeps them above one.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    // Whole and tenths in integers: exact, and no cast that could lose anything.
    let mut unit = 0;
    let mut size = 1024u64;
    while unit + 1 < UNITS.len() && count / size >= 1024 {
        size *= 1024;
        unit += 1;
    }
    let tenths = (count % size).saturating_mul(10) / size;
    format!("{}.{tenths} {}", count / size, UNITS[unit])
}

/// Writes columns as wide as their widest cell; numbers are set to the right.
pub(crate) fn table(out: &mut impl Write, header: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).max(header[column].len())
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let is_number =
        |cell: &str| cell.starts_with(|first: char| first.is_ascii_digit()) && !cell.contains(':');
    let right: Vec<bool> = (0..header.len())
        .map(|column| {
            rows.iter()
                .all(|row| row.get(column).is_none_or(|cell| is_number(cell)))
        })
        .collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (column, cell) in cells.enumerate().take(widths.len()) {
            let width = widths[column];
            text += &if right[column] {
                format!("{cell:>width$}  ")
            } else {
                format!("{cell:<width$}  ")
            };
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&mut header.iter().copied())?;
    rows.iter()
        .try_for_each(|row| line(&mut row.iter().map(String::as_str)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pick_their_unit() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
        assert_eq!(bytes(u64::MAX), "16383.9 PiB");
    }

    #[test]
    fn counts_take_a_plural() {
        assert_eq!(counted(1, "mismatch"), "1 mismatch");
        assert_eq!(counted(2, "mismatch"), "2 mismatches");
        assert_eq!(counted(0, "page"), "0 pages");
    }

    #[test]
    fn long_text_wraps_under_its_label() {
        let mut out = Vec::new();
        labelled(&mut out, "why", &"word ".repeat(40)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().count() > 1);
        assert!(text.lines().all(|line| line.len() <= WIDTH));
        assert!(
            text.lines()
                .skip(1)
                .all(|line| line.starts_with("             word"))
        );
    }
}

//! Golden files, which hold the bytes of messages, and the tables of docs/protocol.md.
//!
//! A line of a golden file is a case: `name | field:hex field:hex ... | note`. The name of a field
//! whose length varies ends with `*`. A line that begins with `#` is a comment. The crate that
//! defines the messages encodes and decodes each case in a test, and compares the document's tables
//! with the fields.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The cases of a golden file.
#[derive(Debug)]
pub struct Golden {
    cases: Vec<Case>,
    used: RefCell<BTreeSet<String>>,
}

/// One message, or a part of one.
#[derive(Debug)]
pub struct Case {
    /// The name, which is unique.
    pub name: String,
    /// The fields in the order of the wire.
    pub fields: Vec<Field>,
    /// The text after the bytes.
    pub note: String,
}

/// One field of a case.
#[derive(Debug)]
pub struct Field {
    /// The name, without the `*` of a field whose length varies.
    pub name: String,
    /// The bytes on the wire.
    pub bytes: Vec<u8>,
    /// Whether the length of the field varies.
    pub varies: bool,
}

impl Field {
    /// The value of a little-endian integer.
    ///
    /// # Panics
    /// The field has more than 8 bytes.
    pub fn number(&self) -> u64 {
        let mut bytes = [0; 8];
        assert!(self.bytes.len() <= 8, "{} is no number", self.name);
        bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        u64::from_le_bytes(bytes)
    }
}

impl Golden {
    /// Parses a golden file.
    ///
    /// # Panics
    /// The file is malformed, or has two cases of one name.
    pub fn parse(text: &str) -> Golden {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let cases: Vec<Case> = lines.map(case).collect();
        let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), cases.len(), "two cases have one name");
        Golden { cases, used: RefCell::default() }
    }

    /// The case with this name.
    ///
    /// # Panics
    /// The file has no such case.
    pub fn case(&self, name: &str) -> &Case {
        self.used.borrow_mut().insert(name.to_owned());
        let case = self.cases.iter().find(|case| case.name == name);
        case.unwrap_or_else(|| panic!("the golden file has no case {name}"))
    }

    /// The names of all cases whose name begins like this.
    pub fn names(&self, prefix: &str) -> BTreeSet<&str> {
        let names = self.cases.iter().map(|case| case.name.as_str());
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// Checks that each case was asked for, so that a change leaves no unused case behind.
    ///
    /// # Panics
    /// A case was not asked for.
    pub fn assert_all_used(&self) {
        let used = self.used.borrow();
        let unused: Vec<&str> =
            self.names("").into_iter().filter(|name| !used.contains(*name)).collect();
        assert!(unused.is_empty(), "no test looks at {unused:?}");
    }
}

fn case(line: &str) -> Case {
    let mut parts = line.splitn(3, '|').map(str::trim);
    let (Some(name), Some(fields), Some(note)) = (parts.next(), parts.next(), parts.next()) else {
        panic!("not `name | fields | note`: {line}")
    };
    let fields = fields.split_whitespace().map(|field| {
        let split = field.rsplit_once(':');
        let (name, hex) = split.unwrap_or_else(|| panic!("not `field:hex`: {field} in {line}"));
        let varies = name.ends_with('*');
        Field { name: name.trim_end_matches('*').to_owned(), bytes: unhex(hex), varies }
    });
    Case { name: name.to_owned(), fields: fields.collect(), note: note.to_owned() }
}

fn unhex(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes();
    assert!(digits.len().is_multiple_of(2) && hex.is_ascii(), "half a byte: {hex}");
    let byte = |pair| u8::from_str_radix(pair, 16).unwrap_or_else(|_| panic!("not hex: {hex}"));
    (0..digits.len() / 2).map(|at| byte(&hex[2 * at..2 * at + 2])).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

impl Case {
    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.fields.iter().flat_map(|field| field.bytes.iter().copied()).collect()
    }

    /// The field with this name.
    ///
    /// # Panics
    /// The case has no such field.
    pub fn field(&self, name: &str) -> &Field {
        let field = self.fields.iter().find(|field| field.name == name);
        field.unwrap_or_else(|| panic!("{} has no field {name}", self.name))
    }

    /// Checks that `encoded` has the bytes of this case.
    ///
    /// # Panics
    /// The bytes differ.
    pub fn assert_bytes(&self, encoded: &[u8]) {
        if encoded == self.bytes() {
            return;
        }
        let mut at = 0;
        for Field { name, bytes, .. } in &self.fields {
            let got = encoded.get(at..at + bytes.len()).unwrap_or_default();
            assert_eq!(
                hex(got),
                hex(bytes),
                "{}: {name} at offset {at} of {}",
                self.name,
                hex(encoded)
            );
            at += bytes.len();
        }
        panic!("{}: {} more bytes: {}", self.name, encoded.len() - at, hex(&encoded[at..]));
    }

    /// Checks the values of fields. Every field must be in `values`, unless its length varies or it
    /// is in `fixed`, which lists fields that no value determines.
    ///
    /// # Panics
    /// A value differs, a field is left out, or a name has no field.
    pub fn assert_values(&self, values: &[(&str, u64)], fixed: &[&str]) {
        for (name, value) in values {
            assert_eq!(self.field(name).number(), *value, "{}: {name}", self.name);
        }
        for Field { name, varies, .. } in &self.fields {
            let is_known = *varies
                || fixed.contains(&name.as_str())
                || values.iter().any(|(known, _)| known == name);
            assert!(is_known, "{}: no value has a field {name}", self.name);
        }
    }

    /// Offset, length and name of each field, in the form that the document's tables use.
    pub fn layout(&self) -> Vec<[String; 3]> {
        let mut at = Some(0);
        let mut row = |field: &Field| {
            let offset = at.map_or("then".to_owned(), |at: usize| at.to_string());
            let len = if field.varies { "n".to_owned() } else { field.bytes.len().to_string() };
            at = at.filter(|_| !field.varies).map(|at| at + field.bytes.len());
            [offset, len, field.name.clone()]
        };
        self.fields.iter().map(&mut row).collect()
    }
}

/// A document with tables.
#[derive(Debug)]
pub struct Document(String);

impl Document {
    /// Reads docs/protocol.md.
    ///
    /// # Panics
    /// The file cannot be read.
    pub fn protocol() -> Document {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/protocol.md");
        Document(std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}")))
    }

    /// The text below a heading, up to the next heading.
    ///
    /// # Panics
    /// The document does not have this heading.
    pub fn section(&self, heading: &str) -> &str {
        let mark = format!("\n{heading}\n");
        let (_, text) =
            self.0.split_once(&mark).unwrap_or_else(|| panic!("no heading {heading:?}"));
        text.split_once("\n#").map_or(text, |(text, _)| text)
    }

    /// The rows of the first table below a heading, without the table's head. Cells are without
    /// backticks.
    ///
    /// # Panics
    /// The document does not have this heading, or no table follows.
    pub fn table(&self, heading: &str) -> Vec<Vec<String>> {
        let lines = self.section(heading).lines().skip_while(|line| !line.starts_with('|'));
        let rows = lines.take_while(|line| line.starts_with('|')).skip(2);
        let cell = |cell: &str| cell.trim().trim_matches('`').to_owned();
        let rows: Vec<Vec<String>> =
            rows.map(|row| row.trim_matches('|').split('|').map(cell).collect()).collect();
        assert!(!rows.is_empty(), "no table behind {heading:?}");
        rows
    }

    /// Checks that the first columns of a table have these cells.
    ///
    /// # Panics
    /// The cells differ.
    pub fn assert_table<const N: usize>(&self, heading: &str, rows: &[[String; N]]) {
        let table = self.table(heading);
        let cells: Vec<&[String]> = table.iter().map(|row| &row[..N.min(row.len())]).collect();
        let want: Vec<&[String]> = rows.iter().map(|row| &row[..]).collect();
        assert_eq!(cells, want, "docs/protocol.md, {heading}");
    }

    /// The bytes of the first code block below a heading. A line begins with bytes in hex. Text
    /// that follows two spaces is a comment.
    ///
    /// # Panics
    /// The document does not have this heading, no code block follows, or the block has other text
    /// than bytes.
    pub fn dump(&self, heading: &str) -> Vec<u8> {
        let blocks = self.section(heading).split("```").nth(1);
        let block = blocks.unwrap_or_else(|| panic!("no code block behind {heading:?}"));
        let lines = block.lines().skip(1).map(|line| line.split("  ").next().unwrap_or(line));
        lines.flat_map(|line| unhex(&line.replace(' ', ""))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "# a comment\n\nA/b | one:0102 rest*:616263 last:ff | note | more\nB | x:00 |\n";

    #[test]
    fn cases_have_fields_with_offsets() {
        let golden = Golden::parse(FILE);
        let case = golden.case("A/b");
        assert_eq!(
            (case.bytes(), case.note.as_str()),
            (b"\x01\x02abc\xff".to_vec(), "note | more")
        );
        assert_eq!((case.field("one").number(), case.field("rest").varies), (0x0201, true));
        let rows = [["0", "2", "one"], ["2", "n", "rest"], ["then", "1", "last"]];
        assert_eq!(case.layout(), rows.map(|row| row.map(str::to_owned)));
        case.assert_bytes(b"\x01\x02abc\xff");
        case.assert_values(&[("one", 0x0201)], &["last"]);
        assert_eq!(golden.names("A"), BTreeSet::from(["A/b"]));
    }

    #[test]
    #[should_panic(expected = "last at offset 5")]
    fn another_byte_is_named_by_its_field() {
        Golden::parse(FILE).case("A/b").assert_bytes(b"\x01\x02abc\xfe");
    }

    #[test]
    #[should_panic(expected = "no value has a field last")]
    fn fields_without_a_value_are_found() {
        Golden::parse(FILE).case("A/b").assert_values(&[("one", 0x0201)], &[]);
    }

    #[test]
    #[should_panic(expected = "no test looks at [\"B\"]")]
    fn unused_cases_are_found() {
        let golden = Golden::parse(FILE);
        golden.case("A/b");
        golden.assert_all_used();
    }

    #[test]
    fn documents_have_tables_and_dumps() {
        let text = "\n# T\n\ntext\n\n| a | b |\n|---|---|\n| `1` | two |\n\n## D\n\n```text\n01 02  one\n03\n```\n";
        let document = Document(text.to_owned());
        document.assert_table("# T", &[["1".to_owned()]]);
        assert_eq!(document.dump("## D"), [1, 2, 3]);
    }
}

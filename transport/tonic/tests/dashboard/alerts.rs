//! Reads docs/alerts.yml. The file uses only a part of YAML that can be read without a library:
//! each rule has the same keys in the same order, and longer texts are blocks.

const FILE: &str = include_str!("../../../../docs/alerts.yml");

#[derive(Debug, Default)]
pub(crate) struct Alert {
    pub(crate) name: String,
    pub(crate) expr: String,
    pub(crate) summary: String,
    pub(crate) description: String,
    pub(crate) runbook: String,
}

/// Returns the rules.
pub(crate) fn read() -> Vec<Alert> {
    let lines = FILE.lines().skip_while(|line| line.starts_with('#'));
    let mut lines = lines.filter(|line| !line.trim().is_empty()).peekable();
    for line in ["groups:", "  - name: tonic-rdma", "    rules:"] {
        assert_eq!(lines.next(), Some(line));
    }
    let mut alerts = Vec::new();
    while let Some(line) = lines.next() {
        let name = line.strip_prefix("      - alert: ").unwrap_or_else(|| panic!("{line:?}"));
        let mut alert = Alert { name: name.to_owned(), ..Alert::default() };
        // Returns the value of a key. A block is indented more than its key.
        let mut value = |indent: usize, key: &str| -> Option<String> {
            let line = lines.next_if(|line| {
                line[indent..].strip_prefix(key).is_some_and(|rest| rest.starts_with(':'))
            })?;
            assert!(line[..indent].trim().is_empty(), "{line:?}");
            let text = line[indent + key.len() + 1..].trim();
            if !["", "|", ">-"].contains(&text) {
                return Some(text.trim_matches('"').to_owned());
            }
            let mut block = Vec::new();
            let deeper =
                |line: &&str| !text.is_empty() && line.len() - line.trim_start().len() > indent;
            while let Some(line) = lines.next_if(deeper) {
                block.push(line.trim());
            }
            Some(block.join(" "))
        };
        alert.expr = value(8, "expr").unwrap();
        if let Some(time) = value(8, "for") {
            assert!(time.strip_suffix('m').unwrap().parse::<u32>().is_ok(), "{name}: {time}");
        }
        value(8, "labels").unwrap();
        let severity = value(10, "severity").unwrap();
        assert!(["info", "warning"].contains(&&*severity), "{name}: {severity}");
        value(8, "annotations").unwrap();
        alert.summary = value(10, "summary").unwrap();
        alert.description = value(10, "description").unwrap();
        alert.runbook = value(10, "runbook").unwrap();
        alerts.push(alert);
    }
    alerts
}

//! The command `rpc-demo top`.
//!
//! | module | what |
//! |---|---|
//! | `look` | a snapshot of a program's channels, servers and connections |
//! | `table` | the table of a snapshot |

mod look;
mod table;

use std::io::{self, Write};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tonic::{Code, Status};

use self::look::{Before, Look, look};
use crate::cli::Top;
use crate::failure::Failure;
use crate::net::{self, ChannelzClient};
use crate::{output, signals, terminal};

/// The size of a terminal that does not report its size, in columns and rows.
const USUAL: (usize, usize) = (80, 24);

/// Shows the list until SIGINT or SIGTERM, or once.
pub(crate) async fn run(args: Top) -> Result<(), Failure> {
    let (client, server) = net::channelz(&args.server, args.timeout).await?;
    let interval = Duration::from_secs(args.interval);
    if args.once || !terminal::draws_on_stdout() {
        return signals::until_signal(once(&client, interval)).await;
    }
    let mut stop = [SignalKind::interrupt(), SignalKind::terminate()]
        .map(|kind| signal(kind).map_err(signals::no_signals))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let [interrupt, terminate] = &mut stop[..] else { return Ok(()) };
    tokio::select! {
        shown = watch(&client, &server, interval) => shown,
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

/// Prints one table, with the rates over one interval.
async fn once(client: &ChannelzClient, interval: Duration) -> Result<(), Failure> {
    let first = look(client).await.map_err(failure)?;
    tokio::time::sleep(interval).await;
    let second = look(client).await.map_err(failure)?;
    let (before, time) = (first.totals(), second.at.duration_since(first.at));
    let lines = table::lines(&second, Some((&before, time)));
    output::checked(lines.iter().try_for_each(|line| writeln!(io::stdout(), "{line}")))
}

/// Draws the table again and again. A server that does not answer is asked again.
async fn watch(client: &ChannelzClient, server: &str, interval: Duration) -> Result<(), Failure> {
    let first = look(client).await.map_err(failure)?;
    let mut resized = signal(SignalKind::window_change()).map_err(signals::no_signals)?;
    let mut screen = Screen::open()?;
    let mut lines = table::lines(&first, None);
    let mut last: (Before, _) = (first.totals(), first.at);
    let mut trouble = None;
    let mut next = tokio::time::interval(interval);
    next.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    next.tick().await;
    loop {
        screen.draw(&title(server, interval, trouble.as_deref()), &lines)?;
        tokio::select! {
            _ = resized.recv() => continue,
            _ = next.tick() => {}
        }
        match look(client).await {
            Ok(now) => {
                lines = shown(&now, &last);
                last = (now.totals(), now.at);
                trouble = None;
            }
            // The server was restarted without `--channelz`.
            Err(status) if status.code() == Code::Unimplemented => return Err(failure(status)),
            Err(status) => trouble = Some(table::shown(status.message())),
        }
    }
}

fn shown(now: &Look, (before, at): &(Before, std::time::Instant)) -> Vec<String> {
    table::lines(now, Some((before, now.at.duration_since(*at))))
}

fn title(server: &str, interval: Duration, trouble: Option<&str>) -> String {
    let title = format!("rpc-demo top {server}, every {} s; Ctrl-C ends it", interval.as_secs());
    match trouble {
        None => title,
        Some(trouble) => format!("NO ANSWER, asking again: {trouble} ({title})"),
    }
}

fn failure(status: Status) -> Failure {
    let what = "cannot list connections";
    if status.code() == Code::Unimplemented {
        let why = "the server does not list its connections";
        return Failure::new(what, why, "start it with `rpc-demo serve --channelz`");
    }
    Failure::status(what, &status)
}

/// The terminal's alternate screen. The normal screen is restored on drop.
struct Screen {
    has_colors: bool,
}

impl Screen {
    fn open() -> Result<Screen, Failure> {
        // Switches to the alternate screen, without a cursor and without line wrap.
        let screen = Screen { has_colors: terminal::has_colors_on_stdout() };
        print("\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(screen)
    }

    fn draw(&mut self, title: &str, lines: &[String]) -> Result<(), Failure> {
        let (columns, rows) = terminal::size_of_stdout().unwrap_or(USUAL);
        let room = rows.saturating_sub(2).max(1);
        let mut frame = "\x1b[H".to_owned();
        let mut put = |line: &str, style: &str| {
            // The text is ASCII.
            let line = line.get(..columns.min(line.len())).unwrap_or_default();
            let (begin, end) = if style.is_empty() { ("", "") } else { (style, "\x1b[0m") };
            frame.push_str(&format!("{begin}{line}{end}\x1b[K\r\n"));
        };
        let style = |style: &'static str| if self.has_colors { style } else { "" };
        put(title, style("\x1b[1m"));
        let hidden = lines.len().saturating_sub(room);
        for (at, line) in lines.iter().take(room).enumerate() {
            match (at, hidden) {
                (0, _) => put(line, style("\x1b[7m")),
                (at, 1..) if at + 1 == room => put(&format!("... {} more", hidden + 1), ""),
                _ => put(line, ""),
            }
        }
        frame.push_str("\x1b[J");
        print(&frame)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = print("\x1b[?7h\x1b[?25h\x1b[?1049l");
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    printed.map_err(|error| Failure::io("cannot write to the terminal", &error))
}
